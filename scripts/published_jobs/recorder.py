"""Stand-ins for packages that a source tree imports: they record what is set on them."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any


class Recorder:
    """An object of any class: it keeps the fields that it is given, and others are empty ones.

    Calling it gives another one with the named arguments as fields; used as a decorator it returns
    the function. One that was never set is false, and neither less nor more than anything.
    """

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, Recorder())

    def __call__(self, *given: Any, **fields: Any) -> Any:
        if len(given) == 1 and inspect.isfunction(given[0]) and not fields:
            return given[0]
        return Recorder(**fields)

    def __float__(self) -> float:
        return 0.0

    def _is_not(self, other: Any) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _is_not

    def __bool__(self) -> bool:
        return bool(self.__dict__)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, key: Any) -> Any:
        return Recorder()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (Recorder,)


def recorded(owner: Any, name: str) -> Any:
    """A field's value; None if it was never set."""
    value = getattr(owner, "__dict__", {}).get(name)
    return None if isinstance(value, Recorder) and not value else value


class _StandIn(types.ModuleType):
    """A module in which every name is a Recorder."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Recorder()
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str, real: tuple[str, ...], others: tuple[str, ...]) -> None:
        self.package, self.real, self.others = package, real, others

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        below = any(name == part or name.startswith(f"{part}.") for part in self.real)
        is_ours = name == self.package or name.startswith(f"{self.package}.")
        if below or not (is_ours or name.partition(".")[0] in self.others):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def standing_in(package: str, folder: str, real: tuple[str, ...]) -> Iterator[None]:
    """Import ``package`` from ``folder`` with the modules in ``real`` as they are and recorders for
    all others of it, and for `transformers`."""
    finder = _Finder(package, real, ("transformers", "nvidia_resiliency_ext"))
    before = set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        for name in sorted({part for path in real for part in _parents(path, package)}):
            stand_in = importlib.import_module(name)
            stand_in.__path__ = [f"{folder}/{name.replace('.', '/')}"]
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.startswith((package, *finder.others)):
                del sys.modules[name]


def _parents(path: str, package: str) -> Iterator[str]:
    """The packages above a module, down from ``package``."""
    parts = path.split(".")
    for i in range(len(package.split(".")), len(parts)):
        yield ".".join(parts[:i])
