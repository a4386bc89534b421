"""A replaced function is replaced wherever it was imported by name."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_magi.adapter.monkeypatch import Swap, replace_everywhere


def original() -> str:
    return "original"


def replacement() -> str:
    return "replacement"


@pytest.fixture(autouse=True)
def this_module_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "original", original)


@pytest.fixture
def importer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that took the function by three names."""
    module = ModuleType("an_importer")
    module.original = module.another_name = module._private = original
    module.equal = SimpleNamespace(original=original)
    module.listed = [original]
    monkeypatch.setitem(sys.modules, "an_importer", module)
    return module


def test_every_name_is_rebound(importer: ModuleType) -> None:
    taken = original
    replace_everywhere(Swap(taken, replacement))
    assert importer.original is importer.another_name is importer._private is replacement
    assert original is replacement and taken is not replacement


def test_what_is_no_module_attribute_stays(importer: ModuleType) -> None:
    taken = original
    replace_everywhere(Swap(taken, replacement))
    assert importer.equal.original is taken and importer.listed == [taken]


def test_the_running_script_is_rebound(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    script.imported_by_name = original
    monkeypatch.setitem(sys.modules, "__main__", script)
    replace_everywhere(Swap(original, replacement))
    assert script.imported_by_name is replacement


def test_identity_counts_and_not_equality(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_module")
    module.first, module.second, module.third = [1], [1], [1]
    monkeypatch.setitem(sys.modules, "a_module", module)
    replace_everywhere(Swap(module.first, "one"), Swap(module.third, "another"))
    assert (module.first, module.second, module.third) == ("one", [1], "another")


def test_odd_entries_of_sys_modules_are_passed_by(
    importer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoDict:
        __slots__ = ()

    monkeypatch.setitem(sys.modules, "absent", None)
    monkeypatch.setitem(sys.modules, "no_dict", NoDict())
    replace_everywhere(Swap(original, replacement))
    assert importer.original is replacement
