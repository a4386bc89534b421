"""Gradients of answers that share a prompt are those of answers packed with their own."""

from __future__ import annotations

import re

import pytest

from tests.examples.test_own_loop import ROOT, start

SAID = re.compile(r"loss (\S+) of (\d+) answers.*?packed: loss (\S+), largest gradient error (\S+)",
                  re.DOTALL)  # fmt: skip


def check(processes: int, answers: int) -> tuple[float, float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = str(ROOT / "examples" / "grpo.py")
    flags = ["--check", f"--cp={processes}", f"--answers={answers}"]
    run = start(*(launcher if processes > 1 else []), script, *flags)
    assert run.returncode == 0, run.stderr[-4000:]
    found = SAID.search(run.stdout)
    assert found is not None and int(found[2]) == answers, run.stdout
    assert float(found[1]) == pytest.approx(float(found[3]), abs=2e-6)
    return float(found[1]), float(found[4])


def test_two_ranks() -> None:
    _, error = check(2, 8)
    assert error < 5e-6


@pytest.mark.slow
def test_one_and_four_ranks() -> None:
    (alone, first), (shared, second) = check(1, 64), check(4, 64)
    assert shared == pytest.approx(alone, abs=2e-6) and max(first, second) < 5e-6
