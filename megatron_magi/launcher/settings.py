"""Overrides the Megatron arguments that plans require, and logs each override."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from megatron_magi.launcher import nvte_env
from megatron_magi.launcher.constraints import REFUSALS, refuse_arguments
from megatron_magi.launcher.session import LauncherState, hook


@hook
def wrap_validate_args(
    launch: LauncherState, original: Any, args: Any, *rest: Any, **kwargs: Any
) -> Any:
    """For `validate_args`: magi's refusals come first, then its settings, then Megatron's own."""
    options = launch.options
    refuse_arguments(args, options.config, options.mask_name, options.balance_step)
    said = change_settings(args)
    take_settings(launch, args)
    with any_seq_length(args):
        result = original(args, *rest, **kwargs)
    launch.args = args
    if getattr(args, "inprocess_restart", False):
        launch.first_args = copy.deepcopy(args)
    if args.rank == 0:
        for line in said:
            print(f"megatron_magi: {line}", flush=True)
    return result


@hook
def wrap_load_yaml(launch: LauncherState, original: Any, yaml_path: str) -> Any:
    """For `load_yaml`, whose arguments are nested, and which `validate_args` does not see."""
    given = SimpleNamespace(yaml_cfg=yaml_path)
    raise SystemExit("\n".join(line for row in REFUSALS for line in row.lines(given)))


def change_settings(args: Any) -> list[str]:
    """Set what magi's plan needs, and return a line for everything that a user may want to know."""
    said = []
    if args.create_attention_mask_in_dataloader:
        args.create_attention_mask_in_dataloader = False
        said.append(
            "--no-create-attention-mask-in-dataloader is set: the plan is the mask; pass it to "
            "stock runs with TransformerEngine too, which it makes faster"
        )
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        said.append(
            "--calculate-per-token-loss is set: ranks hold different numbers of counted tokens"
            + (", so fp16's loss scale settles lower" if getattr(args, "fp16", False) else "")
        )
    if getattr(args, "ddp_average_in_collective", False):
        args.ddp_average_in_collective = False
        said.append(
            "--ddp-average-in-collective is not used: gradients are divided by counted tokens"
        )
    if getattr(args, "inprocess_restart", False):
        said.append(
            "--magi-transport all_to_all is set: an in-process restart ends exchanges over NCCL, "
            "and no copies that wait for a lost rank"
        )
    said += _let_eager_layers_take_shares(args)
    forgotten = nvte_env.forget_backends()
    if forgotten:
        said.append(
            f"{', '.join(forgotten)} are unset: attention is magi's, not TransformerEngine's"
        )
    return said


def _let_eager_layers_take_shares(args: Any) -> Iterator[str]:
    """Megatron's dev branch lets layers without TransformerEngine communicate by all_gather only;
    ours communicate in one way of their own."""
    is_eager = args.transformer_impl == "local" or getattr(args, "fallback_to_eager_attn", None)
    if not hasattr(args, "fallback_to_eager_attn") or not is_eager:
        return
    kinds = args.cp_comm_type
    if args.context_parallel_size > 1 and kinds and {*kinds} != {"all_gather"}:
        args.cp_comm_type = ["all_gather"]
        yield "--cp-comm-type all_gather is set for Megatron's check: attention does not read it"


def take_settings(launch: LauncherState, args: Any) -> None:
    """Let magi's own settings follow the job's: a deterministic one is about attention too."""
    if getattr(args, "inprocess_restart", False):
        _replace_config(launch, transport="all_to_all")
    if _is_deterministic(args):
        _replace_config(launch, deterministic=True)


def _replace_config(launch: LauncherState, **changed: Any) -> None:
    config = dataclasses.replace(launch.options.config, **changed)
    launch.options = dataclasses.replace(launch.options, config=config)


def _is_deterministic(args: Any) -> bool:
    return nvte_env.is_deterministic() or getattr(args, "deterministic_mode", False)


@contextmanager
def any_seq_length(args: Any) -> Iterator[None]:
    """Let Megatron validate with the next length that its own slicing could divide.

    Megatron asserts that 2 * cp divides the length. Only that assertion and the one on
    max_position_embeddings read it, and the length is restored after them.
    """
    multiple = 2 * args.context_parallel_size
    length, positions = args.seq_length, args.max_position_embeddings
    if length is None or length % multiple == 0:
        yield
        return
    args.seq_length = math.ceil(length / multiple) * multiple
    if positions is not None and positions >= length:
        args.max_position_embeddings = max(positions, args.seq_length)
    yield
    args.seq_length = args.encoder_seq_length = length
    args.max_position_embeddings = positions
