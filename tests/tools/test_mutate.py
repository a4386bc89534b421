"""The changes that the mutation script makes, and that it tells killed from survived."""

from __future__ import annotations

import argparse
import ast
import random
from pathlib import Path
from queue import SimpleQueue

import pytest

from tools import mutate

SOURCE = '''
"""Docstring 1."""
LIMIT: int = 3
def clamp(x: int, low: int = 0) -> int:
    if x < low:
        raise ValueError(f"at least {low + 0}, got {x}")
    note(x)
    return x % LIMIT if not x == 2 else None
'''
CHANGES = {
    "3  ->  4", "0  ->  1", "2  ->  3", "x < low  ->  x <= low", "if x < low:  ->  if not x < low:",
    "note(x)  ->  None", "x % LIMIT  ->  x * LIMIT", "x == 2  ->  x != 2",
    "x % LIMIT if not x == 2 else None  ->  x % LIMIT if not not x == 2 else None",
    "return x % LIMIT if not x == 2 else None  ->  return None",
}  # fmt: skip


def test_suites_name_modules_and_tests_that_are_there() -> None:
    package = mutate.ROOT / mutate.PACKAGE
    modules = [p.relative_to(package).as_posix() for p in package.rglob("*.py")]
    for start, tests in mutate.SUITES.items():
        assert any(module.startswith(start) for module in modules), start
        assert all((mutate.ROOT / test).exists() for test in tests), start


def test_every_kind_of_change_and_none_of_messages_or_types() -> None:
    mutants = list(mutate.mutants_of("m.py", SOURCE))
    assert {m.change for m in mutants} == CHANGES
    plain = ast.unparse(ast.parse(SOURCE))
    made = [mutate.mutated(SOURCE, m) for m in mutants]
    assert plain not in made and len(set(made)) == len(mutants)
    assert all(len(set(plain.splitlines()) ^ set(text.splitlines())) == 2 for text in made)


@pytest.mark.slow
def test_killed_survived_and_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / mutate.PACKAGE
    package.mkdir()
    (package / "m.py").write_text("def f(n):\n    while n > 5:\n        n -= 1\n    return n\n")
    (tmp_path / "test_m.py").write_text(
        f"from {mutate.PACKAGE}.m import f\n\ndef test_f():\n    assert f(7) == 5\n"
    )
    monkeypatch.setattr(mutate, "SUITES", {"m.py": ["test_m.py"]})
    source = (package / "m.py").read_text()
    by_change = {m.change: m for m in mutate.mutants_of("m.py", source)}
    places: SimpleQueue[Path] = SimpleQueue()
    places.put(tmp_path)
    args = argparse.Namespace(minutes=1e9, timeout=20)
    wanted = {
        "n > 5  ->  n >= 5": "killed",
        "return n  ->  return None": "killed",
        "n -= 1  ->  n += 1": "too long",
    }
    for change, outcome in wanted.items():
        assert mutate._judge(by_change[change], places, args)[0] == outcome, change
    assert (package / "m.py").read_text() == source
    (tmp_path / "test_m.py").write_text("def test_nothing():\n    pass\n")
    assert mutate._judge(by_change["n > 5  ->  n >= 5"], places, args)[0] == "survived"


def test_unchanged_trees_stand_among_the_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "SUITES", {"a/": ["t"], "b/": ["t"]})
    mutants = [mutate.Mutant(f"{place}/m.py", n, n, "x") for place in "ab" for n in range(9)]
    mixed = mutate._with_unchanged(mutants, random.Random(0))
    unchanged = [m.module for m in mixed if m.node == mutate.UNCHANGED]
    assert sorted(unchanged) == ["a/m.py", "a/m.py", "b/m.py", "b/m.py"]
    assert [m for m in mixed if m.node != mutate.UNCHANGED] == mutants
    assert all(mutate.mutated(SOURCE, m) == SOURCE for m in mixed if m.node == mutate.UNCHANGED)


def test_the_nearest_tests_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "SUITES", {"core/": ["tests"]})
    texts = {"far": "", "user": "from megatron_magi.core.plan import x", "plan": ""}
    (tmp_path / "tests").mkdir()
    for name, text in texts.items():
        (tmp_path / "tests" / f"test_{name}.py").write_text(text)
    found = mutate._nearest_first("core/plan.py", tmp_path)
    assert found == [f"tests/test_{name}.py" for name in ("plan", "user", "far")]
