"""Two context-parallel ranks embed and train what one process does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.example_runs import printed_by_forks

STEP = re.compile(r"loss (\S+), gradient norm (\S+)")


@pytest.mark.parametrize("pooling", ["mean", pytest.param("last", marks=pytest.mark.slow)])
def test_two_ranks_train_what_one_trains(pooling: str, tmp_path: Path) -> None:
    flags = ["--steps=3", f"--pooling={pooling}"]
    alone, shared = (
        [float(x) for step in STEP.findall(printed) for x in step]
        for printed in printed_by_forks("embedding.py", [1, 2], flags, tmp_path)
    )
    assert len(alone) == 6 and alone[4] < alone[0], "three steps, and the loss falls"
    assert shared == pytest.approx(alone, rel=2e-6)
