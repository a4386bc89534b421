"""Everything that keeps a parsed job from running with `--attention-backend magi`."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from megatron_magi.launcher import settings


@dataclass(frozen=True)
class Ignored:
    """An argument of Megatron that our launcher takes and does not follow."""

    argument: str
    works: tuple[Any, ...]
    """Values that ask for nothing."""
    what: str
    """What a user would expect and not get."""


IGNORED = (
    Ignored("deterministic_mode", (False, None), "equal bits in every run"),
    Ignored("use_kitchen_attention", (False, None), "attention by another package"),
    Ignored("batch_invariant_mode", (False, None), "equal bits for every batch size"),
)
"""Arguments that are accepted and not honoured: a job with one of them does not count as accepted.

Without effect by design, and so honoured: `--cp-comm-type` (our plan is the communication),
`--attention-softmax-in-fp32` (it always is), `--apply-query-key-layer-scaling` (it scales scores
and softmax by inverse factors), `--no-masked-softmax-fusion`, `--use-flash-attn`, `--flash-decode`
(inference), and both flags about masks in the data loader (the plan holds the mask)."""


def reasons(args: Any) -> dict[str, str]:
    """Each thing that keeps the job out, by a stable name, with its line.

    Args:
        args: As Megatron's parser returns it, before `validate_args`, where the launcher checks it.
    """
    with transformer_engine_present():
        found = {key_of(line): line for line in refusal_lines(args)}
    for rule in IGNORED:
        value = getattr(args, rule.argument, rule.works[0])
        if value not in rule.works:
            flag = "--" + rule.argument.replace("_", "-")
            found[f"{flag} (not honoured)"] = f"{flag} is taken and not honoured: {rule.what}"
    return found


def key_of(line: str) -> str:
    """The flag in brackets, or else the first one after our switch."""
    in_brackets = re.search(r"\((--[a-z0-9-]+)", line)
    if in_brackets:
        return in_brackets.group(1)
    flags = re.findall(r"--[a-z][a-z0-9-]*", line.replace("--attention-backend magi", ""))
    return flags[0] if flags else line


@contextlib.contextmanager
def transformer_engine_present() -> Iterator[None]:
    """Let the rules find TransformerEngine, which published jobs may assume."""
    find = importlib.util.find_spec

    def find_also(name: str, *rest: Any) -> Any:
        return object() if name == "transformer_engine" else find(name, *rest)

    with mock.patch("importlib.util.find_spec", find_also):
        yield


def refusal_lines(args: Any) -> list[str]:
    """Every refusal of the launcher as one line."""
    return [*_rule_lines(args), *_function_lines(args), *_model_lines(args)]


def _rule_lines(args: Any) -> Iterator[str]:
    for rule in settings.REFUSALS:
        value = getattr(args, rule.argument, rule.works[0])
        if value not in rule.works:
            yield f"{rule.argument}={value!r} ({rule.flag}); {rule.remedy}"


def _function_lines(args: Any) -> Iterator[str]:
    keys = {
        settings._refuse_layers: "(--hybrid-layer-pattern)",
        settings._refuse_routers_that_count_rows: "(--moe-router-load-balancing-type)",
        settings._refuse_pairs_of_stages_over_gloo: "(--distributed-backend)",
        settings._refuse_documents_by_eod_over_stages: "(--reset-attention-mask)",
        settings._refuse_absent_transformer_engine: "(--transformer-impl)",
    }
    for refuse, key in keys.items():
        try:
            refuse(args)
        except SystemExit as end:
            yield f"{key} {end.code}"


def _model_lines(args: Any) -> Iterator[str]:
    """What is refused only when the model is built."""
    is_mla = getattr(args, "multi_latent_attention", False)
    kind = args.position_embedding_type
    if kind in ("mrope", "relative") or (kind == "yarn" and not is_mla):
        yield f"rows follow rope or learned positions, got {kind} (--position-embedding-type)"
    if is_mla and args.apply_rope_fusion:
        yield "multi-latent attention requires no fused rope (--no-rope-fusion)"
    if is_mla and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        yield "multi-latent attention beside tensor parallelism requires (--sequence-parallel)"
    if getattr(args, "qk_clip", False) and args.tensor_model_parallel_size > 1:
        yield "clipping requires tensor parallelism 1 (--qk-clip)"
