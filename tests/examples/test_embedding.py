"""Two context-parallel ranks embed and train what one process does."""

from __future__ import annotations

import re

import pytest

from tests.examples.test_own_loop import ROOT, start

STEP = re.compile(r"loss (\S+), gradient norm (\S+)")


def losses_and_norms(processes: int, pooling: str) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    flags = [f"--cp={processes}", "--steps=3", f"--pooling={pooling}"]
    script = str(ROOT / "examples" / "embedding.py")
    run = start(*(launcher if processes > 1 else []), script, *flags)
    assert run.returncode == 0, run.stderr[-4000:]
    return [float(x) for step in STEP.findall(run.stdout) for x in step]


@pytest.mark.parametrize("pooling", ["mean", pytest.param("last", marks=pytest.mark.slow)])
def test_two_ranks_train_what_one_trains(pooling: str) -> None:
    alone, shared = losses_and_norms(1, pooling), losses_and_norms(2, pooling)
    assert len(alone) == 6 and alone[4] < alone[0], "three steps, and the loss falls"
    assert shared == pytest.approx(alone, rel=2e-6)
