"""The example loop trains the same model at every context-parallel size."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 120


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python on the CPU, without what torchrun would set."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    inherited = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def losses(script: str, processes: int, *flags: str) -> list[float]:
    """Run an example by torchrun, or one process without it, and read the losses it prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    run = start(*(launcher if processes > 1 else []), str(ROOT / "examples" / script), *flags)
    assert run.returncode == 0, run.stderr[-4000:]
    assert f"cp {processes}," in run.stdout, run.stdout
    return [float(x) for x in re.findall(r"loss (\S+)", run.stdout)]


@pytest.mark.slow
def test_two_context_ranks_train_what_one_trains() -> None:
    alone, shared = losses("own_loop.py", 1), losses("own_loop.py", 2, "--cp=2")
    assert len(alone) == 5
    assert alone[-1] < alone[0] - 1
    assert shared == pytest.approx(alone, rel=2e-6)


def refused(
    monkeypatch: pytest.MonkeyPatch, output: pytest.CaptureFixture[str], *flags: str
) -> str:
    """What the example says before it starts anything."""
    script = str(ROOT / "examples" / "own_loop.py")
    monkeypatch.setattr(sys, "argv", [script, *flags])
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: pytest.fail("started"))
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(script, run_name="__main__")
    return output.readouterr().err


def test_more_context_ranks_than_processes_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, capsys, "--cp", "2").splitlines()[-1] == (
        "error: --cp 2 needs a multiple of 2 processes, got one; start it with torchrun "
        "--nproc-per-node 2"
    )


def test_no_context_ranks_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, capsys, "--cp", "0").endswith(
        "error: --cp must be at least 1, got 0; pass the number of context-parallel ranks\n"
    )


def test_every_data_rank_needs_a_sample(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or ranks without one would wait for nobody, and the others for them."""
    monkeypatch.setenv("WORLD_SIZE", "5")
    said = refused(monkeypatch, capsys)
    assert "at most 4 data-parallel ranks have a sample each, got 5; start fewer" in said
