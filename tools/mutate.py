"""Whether the tests notice: random small changes of the source, each against its module's tests.

    python -m tools.mutate --count 300 --seed 0 --record FILE.json [--only core/plan] [--jobs 2]

A mutant is one change of one expression or statement: a comparison, an operator, a number, a
condition, a returned value, a call that is left out. It is killed when the tests of its module fail
or do not end in time. The working tree stays as it is: every job has a copy of its own. A record
that exists is continued: its mutants are not run again. Every suite is also run on an unchanged
tree, mixed with the mutants: where that fails, the suite proves nothing and its mutants count as
not run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from benchmarks.lib.command import command_line
from benchmarks.lib.record import describe
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_magi"
SUITES = {
    "config.py": ["tests/core/test_config.py", "tests/core/plan/test_cost_model.py"],
    "core/mask/row_ranges": ["tests/core/mask", "tests/core/comm/test_group_cast.py"],
    "core/mask/": ["tests/core/mask", "tests/edge"],
    "core/plan/": ["tests/core/plan", "tests/core/runtime/test_plan_interpreter.py", "tests/edge"],
    "core/comm/node_cast": ["tests/core/runtime/test_nodes.py", "tests/core/comm"],
    "core/comm/": ["tests/core/comm", "tests/core/runtime/test_plan_interpreter.py",
                   "tests/core/runtime/test_dist_attn.py"],
    "core/kernel/": ["tests/core/kernel", "tests/magi_attention", "tests/edge"],
    "core/runtime/": ["tests/core/runtime", "tests/edge"],
    "adapter/adam_state": ["tests/training/test_adam_state.py",
                           "tests/training/test_checkpoint.py"],
    "adapter/": ["tests/adapter", "tests/edge"],
    "training/checkpoint/pickled_parts": ["tests/training/test_pickled_parts.py"],
    "training/checkpoint/": ["tests/training/test_checkpoint_facts.py",
                             "tests/training/test_checkpoint_folder.py",
                             "tests/training/test_tensor_files.py",
                             "tests/training/test_checkpoint.py"],
}  # fmt: skip
"""Paths that begin so, and the tests of their modules, quickest first."""

COPIED = (PACKAGE, "tests", "scripts", "tools", "recipes", "docs", "examples", "patches",
          "benchmarks", "setup.py", "pyproject.toml", "README.md")  # fmt: skip

ON_A_GPU = (
    "core/cuda/",
    "core/kernel/hopper/",
    "core/comm/rows",
    "adapter/fused/",
    "adapter/rms_norm",
)
"""Modules of which most lines run on a GPU, or in Triton, alone."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


UNCHANGED = -1
"""In place of a node's number: the tree as it is."""


@dataclass(frozen=True)
class Mutant:
    """One change of one node, by the node's number in ``ast.walk``."""

    module: str
    node: int
    line: int
    change: str


def main() -> int:
    args = _arguments()
    wanted = _sample(args)
    results = json.loads(args.record.read_text())["rows"] if _exists(args.record) else []
    done = {(r["module"], r["node"]) for r in results}
    todo = [m for m in wanted if (m.module, m.node) not in done]
    todo = _with_unchanged(todo, random.Random(args.seed))
    unsound: set[str] = set()
    places: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        for number in range(args.jobs):
            places.put(_copy_of_the_tree(Path(folder) / str(number)))
        jobs = {pool.submit(_judge, mutant, places, args): mutant for mutant in todo}
        for job in as_completed(jobs):
            mutant, (outcome, seconds) = jobs[job], job.result()
            if mutant.node == UNCHANGED and outcome in ("killed", "too long"):
                unsound.add(_start_of(mutant.module))
            print(f"{outcome:9s} {mutant.module}:{mutant.line} {mutant.change}", flush=True)
            if outcome != "not run" and mutant.node != UNCHANGED:
                results.append({**asdict(mutant), "outcome": outcome, "seconds": seconds})
                _write(args.record, results)
    results = [r for r in results if _start_of(r["module"]) not in unsound]
    _write(args.record, results)
    killed = sum(r["outcome"] != "survived" for r in results)
    print(f"{killed} of {len(results)} mutants killed")
    for start in sorted(unsound):
        print(f"the tests of {start} fail without a change; its mutants count as not run")
    return 1 if unsound else 0


def _with_unchanged(mutants: list[Mutant], shuffled: random.Random) -> list[Mutant]:
    """The mutants, and two unchanged trees for every suite that they need, at random places."""
    needed = sorted({_start_of(m.module): m.module for m in mutants}.values())
    mixed = list(mutants)
    for module in (*needed, *needed):
        unchanged = Mutant(module, UNCHANGED, 0, "nothing")
        mixed.insert(shuffled.randrange(len(mixed) + 1), unchanged)
    return mixed


def mutants_of(module: str, source: str) -> Iterator[Mutant]:
    """Every change that this script can make to a module."""
    tree = ast.parse(source)
    skipped = _left_alone(tree)
    for number, node in enumerate(ast.walk(tree)):
        change = None if id(node) in skipped else _change_of(node)
        if change is not None:
            yield Mutant(module, number, getattr(node, "lineno", 0), change)


def mutated(source: str, mutant: Mutant) -> str:
    """The module with the change; comments and layout are lost."""
    if mutant.node == UNCHANGED:
        return source
    tree = ast.parse(source)
    _apply(list(ast.walk(tree))[mutant.node])
    return ast.unparse(ast.fix_missing_locations(tree))


def _left_alone(tree: ast.AST) -> set[int]:
    """Nodes of docstrings, annotations, messages, ``__all__`` and type checks."""
    left: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts.append(node.annotation)
        if isinstance(node, ast.FunctionDef):
            parts.append(node.returns)
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
            parts.append(node)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            parts.append(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            parts.append(node)
        for part in parts:
            if part is not None:
                left.update(id(inner) for inner in ast.walk(part))
    return left


def _change_of(node: ast.AST) -> str | None:
    """What would be changed, in words; None: nothing here."""
    before = copy.deepcopy(node)
    if not _apply(before):
        return None
    was, now = (ast.unparse(n).split("\n")[0][:70] for n in (node, before))
    return f"{was}  ->  {now}" if was != now else None


def _apply(node: ast.AST) -> bool:
    """Change the node in place; False: there is nothing to change."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPS:
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif _returns_something(node) or _only_calls(node):
        node.value = ast.Constant(None)  # type: ignore[attr-defined]
    else:
        return False
    return True


def _returns_something(node: ast.AST) -> bool:
    if not isinstance(node, ast.Return) or node.value is None:
        return False
    return not (isinstance(node.value, ast.Constant) and node.value.value is None)


def _only_calls(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _sample(args: argparse.Namespace) -> list[Mutant]:
    """A random sample, equal for equal sources and seeds."""
    found: list[Mutant] = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        module = path.relative_to(ROOT / PACKAGE).as_posix()
        on_gpu = any(word in module for word in ON_A_GPU)
        if _suite(module) and not on_gpu and module.startswith(args.only):
            found.extend(mutants_of(module, path.read_text()))
    return random.Random(args.seed).sample(found, min(args.count, len(found)))[args.skip :]


def _suite(module: str) -> list[str]:
    return SUITES.get(_start_of(module), [])


def _start_of(module: str) -> str:
    """The key of SUITES that the module's path begins with."""
    return next((start for start in SUITES if module.startswith(start)), "")


def _copy_of_the_tree(place: Path) -> Path:
    """What the tests need, without what is built but the planner's module."""
    place.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, place / name)
    return place


def _judge(
    mutant: Mutant, places: SimpleQueue[Path], args: argparse.Namespace
) -> tuple[str, float]:
    if time.monotonic() - STARTED > args.minutes * 60:
        return "not run", 0.0
    place, began = places.get(), time.monotonic()
    path = place / PACKAGE / mutant.module
    source = path.read_text()
    try:
        path.write_text(mutated(source, mutant))
        outcome = _run_tests(place, _nearest_first(mutant.module, place), args.timeout)
        return outcome, round(time.monotonic() - began, 1)
    finally:
        path.write_text(source)
        places.put(place)


def _nearest_first(module: str, place: Path) -> list[str]:
    """Test files of the module's suite: those named after it, those that import it, the others."""
    name = Path(module).stem
    dotted = f"{PACKAGE}.{module.removesuffix('.py').replace('/', '.')}"
    files = [
        file
        for test in _suite(module)
        for file in ([place / test] if test.endswith(".py") else (place / test).rglob("test_*.py"))
        if file.exists()
    ]

    def far(file: Path) -> int:
        return 0 if name in file.stem else 1 if dotted in file.read_text() else 2

    return [str(file.relative_to(place)) for file in sorted(files, key=far)]


def _run_tests(place: Path, tests: list[str], timeout_s: float) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
               "-m", "not gpu and not multi_gpu and not benchmark", *tests]  # fmt: skip
    job = subprocess.Popen(
        command, cwd=place, env={**os.environ, "PYTHONPATH": str(place)}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        return "survived" if job.wait(timeout_s) == 0 else "killed"
    except subprocess.TimeoutExpired:
        return "too long"
    finally:
        _end(job)


def _end(job: subprocess.Popen[bytes]) -> None:
    """With the worker processes that its tests started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, 9)
    job.wait()


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()


def _write(path: Path | None, results: list[dict[str, object]]) -> None:
    if path is None:
        return
    killed = sum(r["outcome"] != "survived" for r in results)
    meta = {**describe(command_line(), None), "killed": killed, "of": len(results)}
    path.write_text(json.dumps({"meta": meta, "rows": results}, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = CommandParser(description="Whether the tests notice small changes.")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first of the sample")
    parser.add_argument("--only", default="", help="modules whose path begins so")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one mutant")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after this")
    parser.add_argument("--record", type=Path)
    return parser.parse_args()


STARTED = time.monotonic()

if __name__ == "__main__":
    raise SystemExit(guarded(main))
