"""Hooks are put in place where the command line asks for them, once, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_magi.config import MagiConfig
from megatron_magi.launcher import hook_points, install
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.hook_points import HookError, HookPoint
from megatron_magi.launcher.session import LauncherState

SWITCH = ["--attention-backend", "magi"]
module = sys.modules["megatron_magi.launcher.install"]


def original(x: int) -> int:
    return x


class Model:
    def forward(self, x: int) -> int:
        return x


class Place(SimpleNamespace):
    """Two modules of a Megatron, what ran, and the launches that hooks were made for."""

    ran: list[str]
    launches: list[LauncherState]
    megatron: ModuleType
    importer: ModuleType

    def wrap(self, function: Any, launch: LauncherState) -> Any:
        self.launches.append(launch)
        return lambda *given: function(*given) + 100

    def keep(self, function: Any, launch: LauncherState) -> Any:
        self.launches.append(launch)
        return function


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    megatron, importer = ModuleType("some_megatron"), ModuleType("an_importer")
    made = Place(ran=[], launches=[], megatron=megatron, importer=importer)
    monkeypatch.setattr(Model, "forward", Model.forward)
    for name, each in (("some_megatron", megatron), ("an_importer", importer)):
        each.everywhere = each.here = each.kept = None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, each)
    for name in ("everywhere", "here", "kept"):
        function = lambda x: x  # noqa: E731  three that are not each other
        setattr(megatron, name, function)
        setattr(importer, name, function)
    megatron.Model = Model  # type: ignore[attr-defined]
    points = [
        HookPoint("one", "some_megatron", "everywhere", ("x",), made.wrap, everywhere=True),
        HookPoint("two", "some_megatron", "here", ("x",), made.wrap),
        HookPoint("three", "some_megatron", "kept", ("x",), made.keep, everywhere=True),
        HookPoint("four", "some_megatron", "Model.forward", ("x",), made.wrap),
    ]
    monkeypatch.setattr(hook_points, "points_of", lambda version: points)
    monkeypatch.setattr(hook_points, "check", lambda version: made.ran.append("check"))
    for name in ("skip_compilation_of_wheels", "install_cpu_training"):
        monkeypatch.setattr(module, name, lambda name=name: made.ran.append(name))
    module._install_hooks.cache_clear()
    yield made
    module._install_hooks.cache_clear()


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """`install()` under a command line; what is left of its arguments."""
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])
    install()
    assert sys.argv[0] == "pretrain_gpt.py"
    return sys.argv[1:]


ALWAYS = ["skip_compilation_of_wheels", "install_cpu_training"]


@pytest.mark.parametrize("backend", [[], ["--attention-backend", "flash"]])
def test_without_the_switch_megatron_is_left_alone(
    backend: list[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(monkeypatch, "--bf16", *backend) == ["--bf16", *backend]
    assert place.ran == ALWAYS and place.launches == []
    assert place.megatron.everywhere(1) == place.megatron.here(1) == 1


def test_with_the_switch_every_point_is_hooked(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = start(monkeypatch, "--bf16", *SWITCH, "--magi-chunk-size", "64", "--lr", "1")
    assert left == ["--bf16", "--lr", "1"]
    assert place.ran == [*ALWAYS, "check"], "nothing is touched before the check"
    assert [place.megatron.everywhere(1), place.megatron.here(1), Model().forward(1)] == [101] * 3
    assert place.importer.everywhere is place.megatron.everywhere
    assert place.importer.here(1) == 1, "this one is replaced in its own module alone"
    assert place.importer.kept is place.megatron.kept
    (launch,) = {id(launch): launch for launch in place.launches}.values()
    assert launch.options == LauncherOptions(MagiConfig(chunk_size=64)) and len(place.launches) == 4
    assert launch.installed == ["one", "two", "four"], "what stays as it is is no hook"


def test_a_second_call_hooks_nothing_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patched script calls it too, whether or not `megatron_magi.run` has."""
    start(monkeypatch, *SWITCH)
    assert start(monkeypatch, *SWITCH) == []
    assert place.megatron.here(1) == 101 and len(place.launches) == 4


def test_another_megatron_ends_in_one_line(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(version: Any) -> None:
        raise HookError("the launcher requires the hooks of Megatron-LM 0.18 to 0.20")

    monkeypatch.setattr(hook_points, "check", refuse)
    with pytest.raises(SystemExit) as end:
        start(monkeypatch, *SWITCH)
    assert end.value.code == f"megatron_magi: {end.value.__cause__}"
    assert "0.18 to 0.20" in str(end.value.code)
    assert place.megatron.here(1) == 1 and place.launches == [] and place.ran == ALWAYS
