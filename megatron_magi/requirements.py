"""Required packages (numpy, torch, the compiled planner), and a line for each that is missing.

Every way to attention passes ``check_requirements``: the package's public names and everything in
``megatron_magi.core``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
PACKAGES = {
    "numpy": "pip install numpy",
    "torch": "pip install torch, in the build for your CUDA version or for the CPU (pytorch.org)",
}
"""Packages that setup.py does not build, and how to get them. Users choose a build of torch."""


class MissingRequirement(ImportError):
    """Something that this package cannot work without is not there; the message says what to do."""


@cache
def check_requirements() -> None:
    """Import what everything here needs.

    Raises:
        MissingRequirement: the first that is not there or cannot be loaded.
    """
    check_planner()
    for name in PACKAGES:
        check_package(name)


def check_package(name: str) -> Any:
    """The imported package.

    Raises:
        MissingRequirement: it is not there, or its import fails.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: one of its libraries cannot be loaded
        if isinstance(error, ImportError) and error.name == name:
            raise MissingRequirement(explained(error)) from None
        raise MissingRequirement(
            f"megatron_magi needs a working {name}, got from its import: {_one_line(error)}; "
            f"install it anew: {PACKAGES[name]}"
        ) from None


def explained(error: ImportError) -> str:
    """One line for a failed import: the missing package and how to get it."""
    if error.name in PACKAGES:
        remedy = PACKAGES[error.name]
        return f"megatron_magi needs {error.name}, got none in {sys.executable}; {remedy}"
    if isinstance(error, ModuleNotFoundError):
        return f"this needs {error.name}, got none in {sys.executable}; install it"
    return _one_line(error)


def check_planner() -> Any:
    """The compiled planner, `megatron_magi._solver`.

    Raises:
        MissingRequirement: it is not compiled where this package was imported from, or cannot be
            loaded.
    """
    try:
        return importlib.import_module("megatron_magi._solver")
    except ImportError as error:
        raise MissingRequirement(
            f"megatron_magi needs its compiled planner, got {_what_is_there(error)}; {_remedy()}"
        ) from None


def starts_a_command() -> bool:
    """True if this is `megatron-magi` or `python -m megatron_magi...` at its start.

    Those say themselves what is missing, and some of them need nothing. While Python looks for the
    module that -m names, "-m" stands in place of its path.
    """
    return sys.argv[:1] == ["-m"] or Path(*sys.argv[:1]).name == "megatron-magi"


def at_first_use(names: Sequence[str]) -> Callable[[str], Any]:
    """The package's `__getattr__` that imports its public names, `names`, when one is used.

    It raises what that import raises, such as MissingRequirement.
    """

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module 'megatron_magi' has no attribute {name!r}")
        return getattr(importlib.import_module("megatron_magi.public"), name)

    return load


def _what_is_there(error: ImportError) -> str:
    built = sorted(
        path.name for path in PACKAGE.glob("_solver.*") if path.suffix in (".so", ".pyd")
    )
    if any(_is_for_this_python(name) for name in built):
        return f"one in {PACKAGE} that does not load ({_one_line(error)})"
    version = "Python {}.{}".format(*sys.version_info[:2])
    if built:
        return f"one in {PACKAGE} that is not for this {version} ({', '.join(built)})"
    return f"{PACKAGE} without it"


def _remedy() -> str:
    """An installed copy that the checkout hides, or how to make one."""
    installed = _another_copy()
    is_checkout = (PACKAGE.parent / "setup.py").is_file()
    here = f"`{Path(sys.executable).name} -m pip install -e {PACKAGE.parent}`"
    if installed is not None:
        return (
            f"an installed copy with a planner is in {installed}: start Python outside "
            f"{PACKAGE.parent} to use it, or run {here} to use this folder"
        )
    if is_checkout:
        return f"run {here}"
    return "install megatron_magi anew with this Python's pip"


def _another_copy() -> Path | None:
    """A folder of this package that later entries of the path have, with a planner in it."""
    for entry in sys.path:
        folder = Path(entry or ".").resolve() / PACKAGE.name
        if folder == PACKAGE.resolve() or not folder.is_dir():
            continue
        if any(_is_for_this_python(path.name) for path in folder.glob("_solver.*")):
            return folder
    return None


def _is_for_this_python(file_name: str) -> bool:
    return any(file_name == "_solver" + suffix for suffix in EXTENSION_SUFFIXES)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
