"""Imports go to lower layers only; comm and kernel do not know each other."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_magi"
BASE = [
    "config",
    "debug",
    "build",
    "requirements",
    "_solver",
    "checks",
    "core.tensor_checks",
    "core.native",
    "core.cuda",
]
LAYERS = {
    "core.mask": BASE,
    "core.plan": [*BASE, "core.mask"],
    "core.comm": [*BASE, "core.mask", "core.plan"],
    "core.kernel": [*BASE, "core.mask", "core.plan"],
    "core.runtime": [*BASE, "core"],
    "adapter": [*BASE, "core", "PUBLIC"],
    "training": [*BASE, "core", "PUBLIC", "adapter"],
    "launcher": [*BASE, "core", "PUBLIC", "adapter"],
    "run": [*BASE, "launcher"],
    "api": [*BASE, "core"],
    "viz": [*BASE, "core", "training"],
    "cli": [*BASE, "core", "PUBLIC", "adapter", "training", "viz"],
}
"""What each layer may import beside itself; PUBLIC: the names of ``import megatron_magi``."""
WITH_MEGATRON = ("adapter", "launcher", "training", "run")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> list[str]:
    """Dotted names of all that a file imports, also inside functions."""
    names: list[str] = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides the layer"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def within(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")


def public_names() -> set[str]:
    froms = [n for n in ast.walk(parse(PACKAGE / "__init__.py")) if isinstance(n, ast.ImportFrom)]
    return {alias.asname or alias.name for node in froms for alias in node.names} | {"__version__"}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_only_downward(layer: str) -> None:
    files = [p for p in PACKAGE.rglob("*.py") if within(module_of(p), layer)]
    assert files, f"layer {layer} is gone: update LAYERS"
    allowed = [layer, *LAYERS[layer]]
    for path in files:
        for name in imports(path):
            if not within(name, "megatron_magi"):
                continue
            target = name.removeprefix("megatron_magi").lstrip(".")
            is_public = target.split(".")[0] in public_names() | {""}
            ok = any(within(target, a) for a in allowed) or ("PUBLIC" in allowed and is_public)
            assert ok, f"{module_of(path)} must not import {name}"


def test_megatron_is_imported_above_the_core_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        if any(within(n, "megatron") for n in imports(path)):
            assert module_of(path).split(".")[0] in WITH_MEGATRON, path


def test_torch_distributed_stays_in_comm_and_runtime() -> None:
    for path in (PACKAGE / "core").rglob("*.py"):
        if any(within(n, "torch.distributed") for n in imports(path)):
            assert module_of(path).split(".")[1] in ("comm", "runtime"), path


def test_the_environment_is_read_by_four_modules_only() -> None:
    """Debugging, the build, torchrun's place, and the warning about another system's variables."""
    for path in PACKAGE.rglob("*.py"):
        if module_of(path) not in ("debug", "build", "training.launched", "api.environment"):
            text = path.read_text()
            assert "os.environ" not in text and "getenv" not in text, path
