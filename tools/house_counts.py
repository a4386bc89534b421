"""Counts of the house: the way to the kernel, parameters, knobs, sizes, import circles.

    python -m tools.house_counts [--json]

What is counted is read from the sources; nothing is imported. Functions that others prescribe
(MagiAttention's names, Megatron's, Triton's kernels) are named with who prescribes them.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_magi"
MOST_PARAMETERS = 6
PRESCRIBED = {
    "magi_attention/": "MagiAttention",
    "core/kernel/attention.py:flex_flash_attn_func": "MagiAttention",
    "adapter/core_attention.py": "Megatron",
    "adapter/fused/": "Triton",
}
"""Places whose parameters somebody else has chosen."""


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args: argparse.Namespace = parser.parse_args()
    found = counts()
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    for name, value in found.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{name:34} {shown}")
    return 0


def counts() -> dict[str, Any]:
    """Everything that is counted, by name."""
    wide = list(wide_functions())
    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    sizes = [node.end_lineno - node.lineno + 1 for _, node in functions() if node.end_lineno]
    return {
        "files to the kernel": len(way_to_the_kernel()),
        "the way": way_to_the_kernel(),
        "own functions above 6 parameters": [name for name, by in wide if by is None],
        "prescribed functions above 6": sum(by is not None for _, by in wide),
        "knobs of MagiConfig": fields_of("MagiConfig"),
        "Python files": len(lines),
        "Python lines": sum(lines.values()),
        "median lines of a file": statistics.median(lines.values()),
        "longest file": max(lines.values()),
        "median lines of a function": statistics.median(sizes),
        "longest function": max(sizes),
        "C++ and CUDA lines": sum(map(_num_lines, _native_files())),
    }


def way_to_the_kernel() -> list[str]:
    """Our files from the public function to the kernel, in order, as README names them."""
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"<!-- stem -->(.*?)<!-- end stem -->", text, re.S)
    first = block.split(". The first call")[0]
    return re.findall(r"`megatron_magi/([\w/.]+\.(?:py|cpp|cuh?))`", first)


def functions() -> Iterator[tuple[Path, ast.FunctionDef]]:
    """Every function of the package with its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def wide_functions() -> Iterator[tuple[str, str | None]]:
    """(file:function, who prescribes it) of those with too many parameters."""
    for path, node in functions():
        a = node.args
        names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
        if len([n for n in names if n not in ("self", "cls", "ctx")]) > MOST_PARAMETERS:
            place = f"{path.relative_to(PACKAGE).as_posix()}:{node.name}"
            yield place, next((by for at, by in PRESCRIBED.items() if place.startswith(at)), None)


def fields_of(name: str) -> int:
    """Fields of a dataclass of config.py."""
    tree = ast.parse((PACKAGE / "config.py").read_text())
    (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return sum(isinstance(node, ast.AnnAssign) for node in found.body)


def _native_files() -> list[Path]:
    return [p for p in (PACKAGE / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh")]


def _num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


if __name__ == "__main__":
    raise SystemExit(guarded(main))
