"""The table of hook points: which rows a version has, and what of a Megatron does not fit one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.adapter.compat import MegatronVersion
from megatron_magi.launcher import hook_points
from megatron_magi.launcher.hook_points import (
    HOOK_POINTS,
    SUPPORTED,
    HookError,
    HookPoint,
    check,
    points_of,
    problems,
)

V18, V20 = MegatronVersion(0, 18, 2), MegatronVersion(0, 20, 0)


class Model:
    def forward(self, tokens: Any, labels: Any = None) -> None: ...


def train_step(step: Any, **more: Any) -> None: ...


@pytest.fixture(autouse=True)
def megatron(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that the rows of these tests are about."""
    made = ModuleType("some_megatron")
    made.Model, made.train_step, made.number = Model, train_step, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_megatron", made)
    return made


def keep(original: Any, launch: Any) -> Any:
    return original


def row(attribute: str, *parameters: str, module: str = "some_megatron", **more: Any) -> HookPoint:
    return HookPoint("a-row", module, attribute, parameters, keep, **more)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *rows: monkeypatch.setattr(hook_points, "HOOK_POINTS", rows)


def test_the_owner_of_a_function_is_its_module(megatron: ModuleType) -> None:
    assert row("train_step").owner() == (megatron, "train_step")
    assert row("Model.forward").owner() == (Model, "forward")


@pytest.mark.parametrize(
    "point, text",
    [
        (row("eval_step"), "a-row: some_megatron.eval_step (module 'some_megatron' has no"),
        (row("Model.backward"), "(type object 'Model' has no attribute 'backward')"),
        (row("Mamba.forward"), "has no attribute 'Mamba')"),
        (row("f", module="no_megatron"), "a-row: no_megatron.f (No module named 'no_megatron')"),
    ],
)
def test_what_is_not_there_is_named(point: HookPoint, text: str) -> None:
    with pytest.raises(HookError) as missing:
        point.owner()
    assert text in str(missing.value) and [*problems(point)] == [str(missing.value)]
    assert isinstance(missing.value, ImportError)


def test_parameters_that_a_wrapper_reads_must_be_there() -> None:
    assert [*problems(row("Model.forward", "tokens", "labels"))] == []
    lacking = row("Model.forward", "tokens", "mask", "labels", "scale")
    assert [*problems(lacking)] == ["a-row: some_megatron.Model.forward has no mask, scale"]
    assert [*problems(row("train_step", "model"))] != [], "what **more takes has no name"


def test_a_row_without_parameters_may_be_about_anything() -> None:
    assert [*problems(row("number"))] == []


@pytest.mark.parametrize(
    "version, names",
    [
        ((0, 18, 3), ["from the first", "until 0.18"]),
        ((0, 19, 0), ["from the first", "from 0.19"]),
        ((0, 20, 0), ["from the first", "from 0.19"]),
    ],
)
def test_a_version_has_its_rows(
    version: tuple[int, int, int], names: list[str], table: Callable[..., None]
) -> None:
    table(
        HookPoint("from the first", "m", "a", (), keep),
        HookPoint("until 0.18", "m", "a", (), keep, last=(0, 18)),
        HookPoint("from 0.19", "m", "a", (), keep, first=(0, 19)),
    )
    assert [point.name for point in points_of(MegatronVersion(*version))] == names


@pytest.mark.parametrize("version", [(0, 16, 1), (0, 21, 0), (0, 17, 1)])
def test_an_unknown_version_has_none(version: tuple[int, int, int]) -> None:
    known = MegatronVersion(*version)
    text = f"requires Megatron-LM {SUPPORTED}, got {known}; use one of these"
    for ask in (points_of, check):
        with pytest.raises(HookError, match=text):
            ask(known)


def test_every_row_that_does_not_fit_is_in_one_line(table: Callable[..., None]) -> None:
    table(row("train_step", "step"), row("eval_step", last=(0, 18)), row("Model.forward", "mask"))
    with pytest.raises(HookError) as found:
        check(V18)
    said = str(found.value)
    assert "\n" not in said and "got 0.18.2 with other code at a-row: some_megatron.eval" in said
    assert said.count("a-row") == 2 and "Model.forward has no mask; use a released" in said
    with pytest.raises(HookError) as found:
        check(V20)
    assert "eval_step" not in str(found.value), "that row is not of this version"
    table(row("train_step", "step"))
    check(V20)


@pytest.mark.parametrize("minor", [18, 19, 20])
def test_a_version_hooks_nothing_twice(minor: int) -> None:
    points = points_of(MegatronVersion(0, minor, 0))
    names = Counter(point.name for point in points)
    places = Counter((point.module, point.attribute) for point in points)
    assert set(names.values()) == set(places.values()) == {1}
    needed = {"settings", "batch", "gpt", "gpt-forward", "schedule", "step", "load", "save"}
    assert needed <= set(names)


def test_every_row_is_of_some_supported_version() -> None:
    used = {p.name for minor in range(18, 21) for p in points_of(MegatronVersion(0, minor, 0))}
    assert used == {point.name for point in HOOK_POINTS}


def test_rows_of_megatron_core_fit_what_is_installed() -> None:
    """Not every wheel has `megatron.training`; scripts/check_hooks.py compares its rows."""
    minor = min(max(MEGATRON_VERSION[:2], hook_points.FIRST), hook_points.LAST)
    points = points_of(MegatronVersion(*minor, 0))
    core = [point for point in points if point.module.startswith("megatron.core.")]
    assert len(core) >= 5 and [text for point in core for text in problems(point)] == []
