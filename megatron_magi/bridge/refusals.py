"""Collects the unsupported settings of a Bridge job and reports them at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_magi.bridge.arguments import PACKS, arguments_of, in_words_of_bridge
from megatron_magi.launcher.constraints import refusals
from megatron_magi.launcher.flags import LauncherOptions

MODELS = "megatron.bridge.models."
BUILDERS = ("gpt_provider", "hybrid.hybrid_provider", "gemma.gemma_provider")
"""Modules below MODELS whose providers build Megatron's GPTModel or HybridModel from layer specs
as they are."""

VISION = "qwen_vl.qwen3_vl_provider"
"""The module below MODELS whose models select their packed rows by the one function that is hooked,
and take the positions of these rows."""


def refuse_config(config: Any, options: LauncherOptions) -> None:
    """End the process if the job has a setting that does not work.

    Raises:
        SystemExit: with one line for each, all at once.
    """
    args = arguments_of(config)
    if is_vision(config.model):
        args.position_embedding_type = None  # not mrope: the model selects positions by the plan
    found = refusals(args, options.config, mask_name=options.mask_name)
    lines = [*map(in_words_of_bridge, found), *_of_bridge(config), *_of_vision(config)]
    if lines:
        raise SystemExit("\n".join(f"megatron_magi: {line}" for line in lines))


def _provider_module(model: Any) -> str:
    return getattr(getattr(type(model), "provide", None), "__module__", "")


def is_vision(model: Any) -> bool:
    """Returns True for a provider of Qwen3-VL."""
    return _provider_module(model) == MODELS + VISION


def _of_vision(config: Any) -> Iterator[str]:
    if is_vision(config.model) and not getattr(config.dataset, PACKS[1], False):
        yield (
            f"use_magi with {type(config.model).__name__} requires dataset.{PACKS[1]}=True, got "
            f"False: the model slices other batches in an order of its own; set it"
        )


def _of_bridge(config: Any) -> Iterator[str]:
    module = _provider_module(config.model)
    known = module.removeprefix(MODELS) in (*BUILDERS, VISION)
    if module.startswith(MODELS) and not known:
        yield (
            f"use_magi requires a provider that builds Megatron's GPTModel, HybridModel or "
            f"Qwen3-VL, got {type(config.model).__name__}, whose batches, positions or attention "
            f"are its own; train it without use_magi"
        )
    if getattr(config.dist, "use_decentralized_pg", False):
        yield (
            "use_magi requires Megatron's global process groups, got dist.use_decentralized_pg="
            "True; set it to False"
        )
    if getattr(getattr(config, "inprocess_restart", None), "enabled", False):
        yield (
            "use_magi requires a job without in-process restart, got True "
            "(inprocess_restart.enabled): magi's groups are ended by hooks in megatron.training, "
            "which Bridge does not call; set it to False"
        )
    eval_size = getattr(config.dist, "eval_context_parallel_size", None)
    cp_size = config.model.context_parallel_size
    if eval_size not in (None, cp_size):
        yield (
            f"use_magi requires the same context-parallel size for validation, got {cp_size} and "
            f"dist.eval_context_parallel_size={eval_size}; leave it out"
        )
