"""Every bad argument of every public callable is one error that says what to do."""

from __future__ import annotations

import enum
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import megatron_magi
from megatron_magi import magi_attention as api
from megatron_magi import masks
from megatron_magi.core import plan as planning
from tests.edge import (
    api_calls,
    engine_calls_classes,
    engine_calls_functions,
    engine_calls_masks,
    engine_calls_plan,
)
from tests.edge.call import Call

TABLE = {
    megatron_magi: engine_calls_functions.FUNCTIONS + engine_calls_classes.CLASSES,
    planning: engine_calls_plan.PLANNING,
    masks: engine_calls_masks.BUILDERS,
    api: api_calls.FUNCTIONS + api_calls.CLASSES,
}
CALLS = [call for calls in TABLE.values() for call in calls]


def label(value: object) -> str:
    if isinstance(value, Call):
        return f"{value.function.__module__.split('.')[1]}.{value.name}"
    return value if isinstance(value, str) else type(value).__name__


def wrong_with_refusal(call: Call, name: str, bad: Any, text: str) -> str:
    """What is wrong with the answer to a bad argument; empty if nothing is."""
    try:
        call.function(**{**call.good, name: bad})
    except (TypeError, ValueError, NotImplementedError) as error:
        said = str(error)
    else:
        return "accepted"
    names_it = text in said and call.words.get(name, name) in said.lower()
    says_what_is_required = any(word in said for word in ("must", "need"))
    says_what_to_do = "; " in said.partition("got")[2]
    return "" if names_it and says_what_is_required and says_what_to_do else said


@pytest.mark.parametrize("call", CALLS, ids=label)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bad_arguments_are_refused(call: Call) -> None:
    wrong = [
        f"{name}={bad!r:.40}, wants {text!r}: {found}"
        for name, kind in call.kinds.items()
        for bad, text in kind.bad
        if (found := wrong_with_refusal(call, name, bad, text))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("call", CALLS, ids=label)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_good_arguments_pass(call: Call) -> None:
    if call.name != "draw_mask":
        call.function(**call.good)


class Index:
    """An integer of nobody's library."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize("call", CALLS, ids=label)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_integers_of_other_libraries_are_integers(call: Call) -> None:
    for name in (name for name, kind in call.kinds.items() if kind.is_integer):
        value = call.good.get(name)
        if value is None:
            default = inspect.signature(call.function).parameters[name].default
            value = 1 if default is None else default
        call.function(**{**call.good, name: value})
        of_numpy = np.uint64 if value >= 2**63 else np.int64  # a digest has 64 bits
        for other in (of_numpy(value), Index(value)):
            call.function(**{**call.good, name: other})


def public_callables(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Functions, classes and their public methods, by name."""
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isfunction(thing) or hasattr(thing, "__wrapped__"):
            yield name, thing
        elif inspect.isclass(thing) and not issubclass(thing, Exception):
            if not issubclass(thing, enum.Enum):
                yield name, thing
            yield from public_methods(name, thing)


def public_methods(name: str, cls: type) -> Iterator[tuple[str, Any]]:
    ours = [base for base in cls.__mro__ if base.__module__.startswith("megatron_magi")]
    for member, value in [pair for base in ours for pair in vars(base).items()]:
        method = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        is_public = not member.startswith("_") or member in ("__getitem__", "__setitem__")
        if inspect.isfunction(method) and is_public:
            yield f"{name}.{member}", method


def parameters(function: Any) -> set[str]:
    """Of a call, without what Python passes itself."""
    found = inspect.signature(function).parameters
    options = [p for p in found.values() if str(p.annotation).startswith("Unpack[")]
    names = {name for p in options for name in option_names(function, p)}
    anything = {p.name for p in found.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return names | set(found) - {"self", "cls"} - anything


def option_names(function: Any, options: inspect.Parameter) -> set[str]:
    """Keys of the TypedDict that a call takes its last arguments as."""
    name = str(options.annotation).removeprefix("Unpack[").removesuffix("]")
    return set(vars(sys.modules[function.__module__])[name].__annotations__)


@pytest.mark.parametrize("module", TABLE, ids=lambda m: m.__name__)
def test_every_public_callable_and_parameter_is_in_the_table(module: ModuleType) -> None:
    covered = defaultdict(set)
    for call in TABLE[module]:
        covered[call.name] |= {*call.kinds, *call.free}
    public = dict(public_callables(module))
    if module is planning:  # its classes are results, or public elsewhere
        public = {n: f for n, f in public.items() if inspect.isfunction(f) and "." not in n}
    missing = {
        name: left
        for name, function in public.items()
        if (left := parameters(function) - covered[name])
    }
    assert not missing, "give each a Call with good arguments and kinds"
    assert not {n for n in covered if n not in public}, "the table names what is not public"


@pytest.mark.parametrize("module", TABLE, ids=lambda m: m.__name__)
def test_a_parameter_without_a_check_is_one_that_has_no_effect(module: ModuleType) -> None:
    """``free`` is no way around the table."""
    for name in {call.name for call in TABLE[module]}:
        calls = [call for call in TABLE[module] if call.name == name]
        checked = {n for call in calls for n in call.kinds}
        unchecked = {n for call in calls for n in call.free} - checked
        unused = {*api_calls.UNUSED, "grpcoll_config"}
        allowed = {"color", "index_attn_indices", *api.TUNING_ARGUMENTS, *unused}
        assert unchecked <= allowed, (name, unchecked - allowed)
