"""Runs of Bridge's own pretrain on every rank of a world; JSON in, JSON out."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from absent import stand_in_for_absent

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_bridge.py"

stand_in_for_absent()
sys.path.insert(0, str(EXAMPLE.parent))

from megatron_magi.bridge import use_magi  # noqa: E402
from megatron_magi.bridge.cpu import install_cpu_bridge  # noqa: E402

install_cpu_bridge()

from init_by_name import init_by_name  # noqa: E402
from megatron.bridge.peft.lora import LoRA  # noqa: E402
from megatron.bridge.training import setup, train  # noqa: E402
from megatron.bridge.training.finetune import finetune  # noqa: E402
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer  # noqa: E402
from tiny_config import tiny_config  # noqa: E402

from megatron_magi.bridge.launch import BridgeLaunch  # noqa: E402

NullTokenizer.eos_id = NullTokenizer.eod  # Bridge's packed data sets ask for it


def run(
    changes: dict[str, Any] | None = None,
    magi: dict[str, Any] | None = None,
    packed: bool = False,
    lora: bool = False,
    moved: bool = False,
) -> dict[str, Any]:
    """Losses and gradient norms of Bridge's pretrain, and what was printed.

    Args:
        changes: fields of the config, by "part.field".
        magi: options of `use_magi`; None leaves it out.
        packed: packed documents in place of mock data.
        lora: finetune low-rank adapters; the pretrained weights are those drawn by name.
        moved: every first document is planned a token too long.
    """
    _as_torchrun()
    config = tiny_config(packed)
    for name, value in (changes or {}).items():
        part, field = name.split(".")
        setattr(getattr(config, part), field, value)
    seen: dict[str, Any] = {"loss": [], "grad_norm": [], "log": {}}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            _name_weights()
            if moved:
                _move_a_boundary()
            if magi is not None:
                use_magi(config, **magi)
            _observe_steps(seen)
            if lora:
                _skip_pretrained_checkpoint()
                config.peft = LoRA(dim=8)
                config.checkpoint.pretrained_checkpoint = str(config.dataset.dataset_root)
            (finetune if lora else pretrain)(config, forward_step)
    except SystemExit as end:
        return {"refused": str(end.code)}
    except BaseException:
        sys.stdout.write(printed.getvalue())
        raise
    return {**seen, "output": printed.getvalue()}


def example(cp_size: int) -> dict[str, Any]:
    """Losses of examples/megatron_bridge.py as it stands, and what it printed."""
    _as_torchrun()
    seen: dict[str, Any] = {"loss": [], "grad_norm": [], "log": {}}
    printed = io.StringIO()
    _name_weights()
    _observe_steps(seen)
    words = [str(EXAMPLE), "--cp", str(cp_size)]
    with contextlib.redirect_stdout(printed), mock.patch.object(sys, "argv", words):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return {**seen, "output": printed.getvalue()}


def _as_torchrun() -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))


def _name_weights() -> None:
    original = GPTModel.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        init_by_name(self)

    __init__.__wrapped__ = original  # type: ignore[attr-defined]
    GPTModel.__init__ = __init__


def _move_a_boundary() -> None:
    bounds_of = BridgeLaunch.bounds_of

    def moved(launch: BridgeLaunch, sample: dict[str, Any]) -> list[int]:
        start, end, *rest = bounds_of(launch, sample)
        return [start, end + 1, *rest]

    BridgeLaunch.bounds_of = moved  # type: ignore[method-assign]


def _skip_pretrained_checkpoint() -> None:
    setup.checkpoint_exists = lambda path: path is not None
    setup._load_checkpoint_from_path = lambda **kwargs: None


def _observe_steps(seen: dict[str, Any]) -> None:
    original = train.train_step

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for name, value in result[0].items():
            series = seen["loss"] if name == "lm loss" else seen["log"].setdefault(name, [])
            series.append(float(value))
        seen["grad_norm"].append(float(result[5]))
        return result

    train.train_step = train_step
