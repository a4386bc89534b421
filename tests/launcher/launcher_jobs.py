"""Runs of a pretrain script through the launcher, on every rank of a world; JSON in, JSON out."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import fetch

# Megatron is imported once, before worlds are forked; hooks are put in place in the forked ones.
from megatron_magi.launcher.cpu import install_cpu_training, skip_compilation_of_wheels

skip_compilation_of_wheels()
install_cpu_training()
with contextlib.suppress(ImportError):  # compiled already, by scripts/test_megatron.sh
    from megatron.core.datasets import helpers_cpp  # noqa: F401
    from megatron.core.datasets import utils as dataset_utils

    dataset_utils.compile_helpers = lambda: None

with contextlib.suppress(ImportError):  # each version has its own
    import megatron.core.datasets.blended_megatron_dataset_builder
    import megatron.core.datasets.gpt_dataset
    import megatron.core.tokenizers.text
    import megatron.training.datasets.sft_dataset
    import megatron.training.yaml_arguments
with contextlib.suppress(ImportError):
    import megatron.core.models.mimo  # noqa: F401

from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.training import training  # noqa: E402

# By its folder, because a checkout of Megatron has a package examples of its own.
sys.path.append(str(Path(__file__).parents[2] / "examples"))

from init_by_name import init_by_name  # noqa: E402
from tiny_flags import TINY, use_few_documents  # noqa: E402

import megatron_magi.core.kernel.reference  # noqa: E402
import megatron_magi.launcher.hook_points  # noqa: E402, F401
from benchmarks.train.pretrain_cases import words  # noqa: E402
from megatron_magi import run  # noqa: E402

use_few_documents()

with contextlib.suppress(ImportError):  # not every version has this parser
    from read_docstrings import read_docstrings_once

    read_docstrings_once()


def pretrain(
    script: str,
    flags: dict[str, Any] | None = None,
    damage: str | None = None,
    drawn_weights: bool = False,
) -> dict[str, Any]:
    """Run the script; its losses and gradient norms unrounded, its validation losses, its output,
    and the names of the model's module classes.

    Args:
        flags: over TINY; None takes a flag away, True writes it without a value.
        damage: name of a function of `damages` (breaks something) or `conversations` (data) to
            call first.
        drawn_weights: those that Megatron draws, instead of equal ones in every layout.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
        TORCH_COMPILE_DISABLE="1",
    )
    seen: dict[str, Any] = {"loss": [], "grad_norm": [], "log": {}}
    _observe(seen, drawn_weights)
    if damage is not None:
        import conversations
        import damages

        (getattr(damages, damage, None) or getattr(conversations, damage))()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            run.main([script, *words({**TINY, **(flags or {})})])
    except SystemExit as end:
        if end.code not in (0, None):
            sys.stdout.write(printed.getvalue())
            raise RuntimeError(f"SystemExit: {end.code}") from end
    seen["output"] = printed.getvalue()
    return seen


def _observe(seen: dict[str, Any], drawn_weights: bool) -> None:
    """Equal weights in every layout, and every step's figures in full precision."""
    _note_numbers(seen.setdefault("drawn", {}))
    for kind in [] if drawn_weights else _model_kinds():
        kind.__init__ = _with_named_weights(kind.__init__, seen)
    step, original = training.train_step, run.runpy.run_path

    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = observed(*args, **kwargs)
        for name, value in result[0].items():
            series = seen["loss"] if name == "lm loss" else seen["log"].setdefault(name, [])
            series.append(float(value))
        seen["grad_norm"].append(float(result[5]))
        return result

    observed = step

    def run_path(*args: Any, **kwargs: Any) -> Any:
        nonlocal observed
        observed = training.train_step  # with our hook in it
        training.train_step = train_step
        training.evaluate = _observed_evaluate(training.evaluate, seen)
        return original(*args, **kwargs)

    run.runpy.run_path = run_path


def _note_numbers(drawn: dict[str, list[list[int]]]) -> None:
    """Keep the numbers of the samples of every microbatch that this process reads, by split."""
    original = fetch._MapDatasetFetcher.fetch

    def noted(self: Any, numbers: list[int]) -> Any:
        dataset = self.dataset
        split = getattr(dataset, "split", None) or dataset.index_split
        drawn.setdefault(split.name, []).append([int(number) for number in numbers])
        return original(self, numbers)

    fetch._MapDatasetFetcher.fetch = noted


def _observed_evaluate(original: Any, seen: dict[str, Any]) -> Any:
    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        losses = result[0] or {}
        seen.setdefault("valid", []).extend(float(x) for x in losses.values())
        return result

    return evaluate


def _model_kinds() -> list[Any]:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return [GPTModel, HybridModel]


def _with_named_weights(original: Any, seen: dict[str, Any]) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        init_by_name(self)
        kinds = {type(module).__name__ for module in self.modules()}
        seen["modules"] = sorted(kinds | set(seen.get("modules", ())))

    return __init__


def write_corpus(prefix: str) -> None:
    """Megatron's .bin and .idx of documents of uneven lengths, each with an end of 127."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = torch.Generator().manual_seed(5)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in torch.randint(3, 70, (400,), generator=generator).tolist():
        tokens = torch.randint(0, 127, (length,), generator=generator)
        tokens[-1] = 127
        builder.add_document(tokens, [length])
    builder.finalize(f"{prefix}.idx")


def write_uneven_corpus(prefix: str, seed: int) -> None:
    """Documents of 3 to 13 tokens, and every sixth of 150 to 499, so that samples cost differently;
    each with an end of 127."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for number in range(600):
        length = int(rng.integers(3, 14) if number % 6 else rng.integers(150, 500))
        tokens = torch.from_numpy(rng.integers(0, 127, length))
        tokens[-1] = 127
        builder.add_document(tokens, [length])
    builder.finalize(f"{prefix}.idx")


def scheduled_batch(sample: dict[str, list[int]]) -> dict[str, Any]:
    """What the hook of Megatron's packing scheduler makes of one stream, on this rank."""
    from types import SimpleNamespace

    from megatron.core import parallel_state
    from megatron.core.datasets import data_schedule
    from megatron.core.transformer import TransformerConfig

    from megatron_magi import MagiConfig, position_ids
    from megatron_magi.adapter.carried_plan import carried_plan
    from megatron_magi.launcher.batch import replace_scheduled_batch
    from megatron_magi.launcher.flags import LauncherOptions
    from megatron_magi.launcher.session import LauncherState

    world = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    launch = LauncherState(
        LauncherOptions(MagiConfig()), args=SimpleNamespace(reset_attention_mask=False)
    )
    launch.sequences = (1, len(sample["tokens"]))
    launch.model_config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, context_parallel_size=world
    )
    hooked = replace_scheduled_batch(
        data_schedule.get_batch_on_this_rank_for_sequence_packing, launch
    )
    given: dict[str, Any] = {
        name: torch.tensor(row, dtype=torch.int32 if "cu" in name else torch.int64)
        for name, row in sample.items()
    }
    given["loss_mask"] = given["loss_mask"].float()
    given["max_seqlen"] = int(given["cu_seqlens_padded"].diff().max())
    tokens, labels, loss_mask, _, positions, _, padding = hooked(iter([given]))
    packed = carried_plan(tokens)
    assert packed is not None
    rows = [tokens, labels, loss_mask, positions, padding]
    return {
        "rows": [row.reshape(-1).tolist() for row in rows],
        "global": position_ids(packed.token_plan, launch.cp_group()).tolist(),
        "area": packed.token_plan.mask.area(),
        "total": packed.token_plan.mask.total_seqlen_q,
    }
