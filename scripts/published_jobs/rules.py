"""Everything that keeps a parsed job from running with `--attention-backend magi`."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from megatron_magi.launcher import refusals


@dataclass(frozen=True)
class Ignored:
    """An argument of Megatron that our launcher takes and does not follow."""

    argument: str
    works: tuple[Any, ...]
    """Values that ask for nothing."""
    what: str
    """What a user would expect and not get."""


IGNORED = (
    Ignored("use_kitchen_attention", (False, None), "attention by another package"),
    Ignored("batch_invariant_mode", (False, None), "equal bits for every batch size"),
)
"""Arguments that are accepted and not honoured: a job with one of them does not count as accepted.

Without effect by design, and so honoured: `--cp-comm-type` (our plan is the communication),
`--attention-softmax-in-fp32` (it always is), `--apply-query-key-layer-scaling` (it scales scores
and softmax by inverse factors), `--no-masked-softmax-fusion`, `--use-flash-attn`, `--flash-decode`
(inference), both flags about masks in the data loader (the plan holds the mask), and
`--ddp-average-in-collective`, which the launcher switches off and says so."""


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
    """Every refusal of the launcher as one line, and what is refused only by the built model."""
    return [*refusals.refusals(args), *_model_lines(args)]


def _model_lines(args: Any) -> Iterator[str]:
    tp_size = args.tensor_model_parallel_size
    if getattr(args, "qk_clip", False) and tp_size > 1:
        yield f"clipping of logits requires tensor parallelism 1, got {tp_size} (--qk-clip)"
    if getattr(args, "mtp_hsm", False) and (
        args.context_parallel_size > 1 or args.sequence_parallel
    ):
        yield "mixing of hidden states requires all rows on one rank (--mtp-hsm)"
    if _has_lonely_mtp(getattr(args, "pipeline_model_parallel_layout", None)):
        yield (
            "multi-token prediction requires its layers beside the loss, got a stage of their own "
            "(--pipeline-model-parallel-layout)"
        )


def _has_lonely_mtp(layout: str | list[list[str]] | None) -> bool:
    """Whether a layout, such as `Et*7|t*7mL` or a list of stages, has MTP away from the loss."""
    if isinstance(layout, str):
        return any("m" in stage and "L" not in stage for stage in layout.split("|"))
    return any("mtp" in stage and "loss" not in stage for stage in layout or ())
