"""Packages that Megatron-Bridge imports for data and models that these tests do not use."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

NAMES = ("megatron.energon",)
"""Of these, only those that are not installed get a stand-in."""


class _Nothing(type):
    """A class with every attribute, each of which is such a class again; calling it gives one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not any(name == each or name.startswith(f"{each}.") for each in self.names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in_for_absent() -> None:
    """Let an import of any of `NAMES` succeed."""
    absent = tuple(name for name in NAMES if importlib.util.find_spec(name) is None)
    if absent:
        sys.meta_path.append(_Finder(absent))
