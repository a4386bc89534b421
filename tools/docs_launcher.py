"""Tables of docs/reference/flags.md and docs/design/launcher.md, from the launcher's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from benchmarks.lib import changed_arguments
from megatron_magi import CostTable, MagiConfig
from megatron_magi.launcher import (
    constraints,
    flags,
    hook_points,
    state_refusals,
)
from tools.docs_text import attribute_docs, one_line

OTHER_FLAGS = {
    "attention_backend": (
        "`magi`",
        "The switch. Megatron's own values leave Megatron as it is.",
    ),
    "mask": (
        "`MODULE:FUNCTION`",
        "The function that returns the mask of every microbatch, see "
        "[any other mask](../guides/megatron_lm.md#any-other-mask).",
    ),
    "balance_step": (
        "none",
        "Deals the [samples of a step](../guides/megatron_lm.md#samples-of-equal-cost) to replicas "
        "and microbatches so that their attention costs the same.",
    ),
}
"""Flags that are no field of MagiConfig or its cost table: (value, what it does)."""


def flag_table() -> Iterator[str]:
    """Every flag of the parser, and the sentence below the field that it sets."""
    yield "| flag | value | default | what it does |"
    yield "|---|---|---|---|"
    notes = attribute_docs(CostTable) | attribute_docs(MagiConfig)
    for action in flags.flag_parser()._actions:
        flag = action.option_strings[0]
        if action.dest in OTHER_FLAGS:
            value, note = OTHER_FLAGS[action.dest]
            yield f"| `{flag}` | {value} | | {note} |"
            continue
        of = "costs." if action.dest in flags.COST_FLAGS else ""
        default = attrgetter(of + action.dest)(MagiConfig())
        note = notes[action.dest]
        if of or flag != f"--magi-{action.dest.replace('_', '-')}":
            note = f"`{of}{action.dest}`: {note}"
        if action.nargs == 0:
            value, default = f"none; sets `{action.const}`", f"`{default}`"
        else:
            value = ", ".join(f"`{choice}`" for choice in action.choices or ())
            value = value or {int: "integer", float: "number"}[action.type]  # type: ignore[index]
            unset = "none" if of else "the planner's choice"
            default = unset if default is None else f"`{default}`"
        yield f"| `{flag}` | {value} | {default} | {note} |"


def change_table() -> Iterator[str]:
    """Settings of a job that the flag replaces, and which of them stock Megatron can have too."""
    yield "| setting | with the flag | reason | stock Megatron has it with |"
    yield "|---|---|---|---|"
    arguments = (replace(x, name=f"`args.{x.name}`") for x in changed_arguments.ARGUMENTS)
    for change in (*arguments, *changed_arguments.BESIDES_ARGUMENTS):
        stock = f"`{change.stock_flag}`" if change.stock_flag else "-"
        yield f"| {change.name} | {change.becomes} | {change.reason} | {stock} |"


def refusal_table() -> Iterator[str]:
    """Arguments of Megatron that end a run before it starts; equal remedies share a row."""
    yield "| flag of Megatron | must be | what to do |"
    yield "|---|---|---|"
    rows: dict[tuple[str, str], list[str]] = {}
    for rule in constraints.REFUSALS:
        works = f"`{rule.works[0]}`"
        if rule.works[0] is False or rule.works[0] is None:
            works = "not given"
        rows.setdefault((works, rule.remedy), []).append(f"`{rule.flag}`")
    for (works, remedy), refused in rows.items():
        yield f"| {', '.join(refused)} | {works} | {remedy} |"
    others = state_refusals.OTHER_LAYERS.items()
    layers = ", ".join(f"`{symbol}` ({kind})" for symbol, kind in others)
    yield f"| `--hybrid-layer-pattern` | without {layers} | leave these layers out |"


def hook_table() -> Iterator[str]:
    """Places of Megatron that are replaced, by the module that replaces them and its purpose."""
    yield "| hooks | replaced in Megatron | by `launcher/` | what for |"
    yield "|---|---|---|---|"
    rows: dict[tuple[str, str], list[hook_points.HookPoint]] = {}
    for point in hook_points.HOOK_POINTS:
        module = inspect.getmodule(point.wrap)
        assert module is not None, f"{point.name} is wrapped by a function of a module"
        own = one_line(point.wrap.__doc__)  # "For `name`: ..." unless the place is only checked
        purpose = one_line(module.__doc__) if own.startswith("For ") else own
        rows.setdefault((module.__name__.rpartition(".")[2], purpose), []).append(point)
    for (module, purpose), points in rows.items():
        names = ", ".join(f"{point.name}{_versions(point)}" for point in points)
        places = ", ".join(dict.fromkeys(f"`{point.attribute}`" for point in points))
        yield f"| {names} | {places} | `{module}.py` | {purpose} |"


def _versions(point: hook_points.HookPoint) -> str:
    """The versions that have the place, in brackets unless all have it."""
    first, last = (".".join(map(str, minor)) for minor in (point.first, point.last))
    if point.last != hook_points.LAST:
        return f" (to {last})"
    return f" (from {first})" if point.first != hook_points.FIRST else ""


TABLES = dict(flags=flag_table, refusals=refusal_table, hooks=hook_table, changes=change_table)
