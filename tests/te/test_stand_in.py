"""The stand-in for TransformerEngine has the names and arguments of the package itself."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.te, pytest.mark.gpu]
STAND_IN = Path(__file__).parents[1] / "stand_ins" / "transformer_engine"
OF_THE_STAND_IN = {
    *("new_weight", "replicated", "gather_rows", "sum_and_keep_rows", "sum_over", "same"),
    *("Exchange", "enter_parallel", "leave_parallel"),
}
"""Helpers that its layers share, which the package has no counterpart of."""


def definitions() -> Iterator[tuple[str, str, ast.ClassDef | ast.FunctionDef]]:
    """(module, name, definition) of everything public in the stand-in."""
    for path in sorted(STAND_IN.rglob("*.py")):
        parts = path.relative_to(STAND_IN.parent).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and is_mirrored(node.name):
                yield module, node.name, node


def is_mirrored(name: str) -> bool:
    """Whether the package has to have it too."""
    return not name.startswith("_") and name not in OF_THE_STAND_IN


def real(module: str, name: str) -> Any:
    """What the package calls so: in the module, or in `pytorch` where the module is another one."""
    for place in (module, "transformer_engine.pytorch", "transformer_engine.pytorch.quantization"):
        try:
            found = getattr(importlib.import_module(place), name, None)
        except ImportError:
            continue
        if found is not None:
            return found
    return None


def arguments(function: ast.FunctionDef) -> set[str]:
    """Names that a caller may use."""
    given = function.args
    names = {each.arg for each in [*given.args, *given.kwonlyargs]}
    return names - {"self", "cls"}


@pytest.mark.parametrize(
    ("module", "name", "node"), [pytest.param(*x, id=f"{x[0]}.{x[1]}") for x in definitions()]
)
def test_the_package_has_it_too(
    module: str, name: str, node: ast.ClassDef | ast.FunctionDef
) -> None:
    found = real(module, name)
    assert found is not None, f"TransformerEngine has no {name}"
    if isinstance(node, ast.FunctionDef):
        takes(found, node)
        return
    for method in (x for x in node.body if isinstance(x, ast.FunctionDef)):
        if method.name == "__init__" or not method.name.startswith("_"):
            assert hasattr(found, method.name), f"TransformerEngine's {name} has no {method.name}"
            takes(getattr(found, method.name), method)


def takes(found: Any, node: ast.FunctionDef) -> None:
    """Its arguments are those of the package's; a forward's first may have another name."""
    there = inspect.signature(inspect.unwrap(found)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in there.values()):
        return
    positional = [each.arg for each in node.args.args if each.arg not in ("self", "cls")]
    named = arguments(node) - ({positional[0]} if node.name == "forward" else set())
    assert named <= set(there), f"{node.name} takes no {sorted(named - set(there))}"
