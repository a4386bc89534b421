"""Gradients of answers that share a prompt are those of answers packed with their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.example_runs import printed_by_forks

SAID = re.compile(r"loss (\S+) of (\d+) answers.*?packed: loss (\S+), largest gradient error (\S+)",
                  re.DOTALL)  # fmt: skip


def check(sizes: list[int], answers: int, folder: Path) -> list[tuple[float, float]]:
    """(loss, largest gradient error) on each of these numbers of ranks."""
    results = []
    flags = ["--check", f"--answers={answers}"]
    for printed in printed_by_forks("grpo.py", sizes, flags, folder):
        found = SAID.search(printed)
        assert found is not None and int(found[2]) == answers, printed
        assert float(found[1]) == pytest.approx(float(found[3]), abs=2e-6)
        results.append((float(found[1]), float(found[4])))
    return results


def test_two_ranks(tmp_path: Path) -> None:
    [(_, error)] = check([2], 8, tmp_path)
    assert error < 5e-6


@pytest.mark.slow
def test_one_and_four_ranks(tmp_path: Path) -> None:
    (alone, first), (shared, second) = check([1, 4], 64, tmp_path)
    assert shared == pytest.approx(alone, abs=2e-6) and max(first, second) < 5e-6
