"""The example loop trains the same model at every context-parallel size."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.examples.example_runs import ROOT, printed_by_forks


@pytest.mark.slow
def test_two_context_ranks_train_what_one_trains(tmp_path: Path) -> None:
    first, second = printed_by_forks("own_loop.py", [1, 2], [], tmp_path)
    assert "cp 1," in first and "cp 2," in second
    alone, shared = ([float(x) for x in re.findall(r"loss (\S+)", p)] for p in (first, second))
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
