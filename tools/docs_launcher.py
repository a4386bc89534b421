"""Tables of docs/reference/flags.md and docs/design/launcher.md, from the launcher's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from types import ModuleType

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
        "The switch. Megatron's own values are passed on to Megatron, and nothing is hooked.",
    ),
    "mask": (
        "`MODULE:FUNCTION`",
        "A function that makes the [mask of every microbatch]"
        "(../guides/megatron_lm.md#any-other-mask).",
    ),
    "balance_step": (
        "none",
        "Deals the samples of a step to replicas and microbatches at "
        "[equal attention cost](../guides/megatron_lm.md#samples-of-equal-cost).",
    ),
}
"""Flags that are no field of MagiConfig or its cost table: (value, what it does)."""


def flag_table() -> Iterator[str]:
    """Every flag of the launcher, from the parser, and the docstring of the field that it sets."""
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
        text = notes[action.dest].removesuffix(" None: the planner's cost model.")
        note = f"`{of}{action.dest}`: {text}"
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
    """Arguments of Megatron that end a run before it starts, grouped by their remedy."""
    yield "| flag of Megatron | what to do |"
    yield "|---|---|"
    remedies: dict[str, list[str]] = {}
    for rule in constraints.REFUSALS:
        remedies.setdefault(rule.remedy, []).append(f"`{rule.flag}`")
    for remedy, names in remedies.items():
        yield f"| {', '.join(names)} | {remedy} |"
    others = state_refusals.OTHER_LAYERS.items()
    layers = ", ".join(f"`{symbol}` ({kind})" for symbol, kind in others)
    yield f"| {layers} in `--hybrid-layer-pattern` | leave these layers out |"


def hook_table() -> Iterator[str]:
    """Functions of Megatron that each launcher module replaces, by their last two names."""
    yield "| `megatron_magi/launcher/` | replaces | purpose |"
    yield "|---|---|---|"
    replaced: dict[ModuleType, list[str]] = {}
    for point in hook_points.HOOK_POINTS:
        module = inspect.getmodule(point.wrap)
        assert module is not None, f"{point.name} is wrapped by a function of a module"
        name = f"`{point.module.rpartition('.')[2]}.{point.attribute}`{_versions(point)}"
        replaced.setdefault(module, []).append(name)
    for module, names in replaced.items():
        path = module.__name__.rpartition(".")[2] + ".py"
        yield f"| `{path}` | {', '.join(names)} | {one_line(module.__doc__)} |"


def _versions(point: hook_points.HookPoint) -> str:
    """The versions that have the function, if not all do."""
    if (point.first, point.last) == (hook_points.FIRST, hook_points.LAST):
        return ""
    first, last = (".".join(map(str, minor)) for minor in (point.first, point.last))
    return f" ({first})" if first == last else f" ({first} to {last})"


TABLES = dict(flags=flag_table, refusals=refusal_table, hooks=hook_table, changes=change_table)
