"""`--async-save`: training goes on while a process of Megatron's writes the checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import megatron_magi.adapter
from tests.launcher.layouts import CP2, SMALL_SCRIPT
from tests.launcher.tiny_flags import TINY
from tests.launcher.two_ranks import Ranks

pytestmark = [
    pytest.mark.skipif(
        megatron_magi.adapter.MEGATRON_VERSION[:2] != (0, 19),
        reason="the script is written for megatron.training of the 0.19 wheel",
    ),
    pytest.mark.timeout(300),
]

WITH_WORKER = (str(Path(__file__).parent / "run_with_worker.py"), str(SMALL_SCRIPT))
SIX: dict[str, Any] = {**TINY, **CP2, "train-iters": 6, "no-load-rng": True}


def save(folder: Path) -> dict[str, Any]:
    return {
        "async-save": True,
        "use-persistent-ckpt-worker": True,
        "async-strategy": "mcore",
        "save": str(folder),
        "save-interval": 2,
    }


def losses(outputs: list[str]) -> list[float]:
    """Those that the last rank logs."""
    return [float(x) for x in re.findall(r" lm loss: ([\d.E+-]+)", outputs[-1])]


def after_a_resume(logged: list[float]) -> list[float]:
    """A resumed run logs its second loss as the mean of two, with the flag and without it."""
    first, mean, *rest = logged
    return [first, 2 * mean - first, *rest]


@pytest.fixture(scope="module")
def whole() -> list[float]:
    return losses(Ranks(SIX).outputs())


@pytest.mark.slow
def test_a_run_that_saves_trains_and_resumes_as_one_that_does_not(
    whole: list[float], tmp_path: Path
) -> None:
    outputs = Ranks({**SIX, **save(tmp_path), "exit-interval": 4}, WITH_WORKER).outputs()
    assert losses(outputs) == whole[:4]
    assert "scheduled an async checkpoint save at iteration       2" in outputs[0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    resumed = losses(Ranks({**SIX, "load": str(tmp_path), "ckpt-step": 2}).outputs())
    assert after_a_resume(resumed) == pytest.approx(whole[2:], rel=1e-5)


@pytest.mark.slow
def test_a_run_that_is_killed_during_a_save_goes_on_from_the_last_whole_one(
    whole: list[float], tmp_path: Path
) -> None:
    first = "successfully saved checkpoint from iteration       2"
    second = "async checkpoint save at iteration       4"
    Ranks({**SIX, **save(tmp_path)}, WITH_WORKER).kill_at(second, first)
    done = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert done in (2, 4)
    resumed = losses(Ranks({**SIX, "load": str(tmp_path)}).outputs())
    assert after_a_resume(resumed) == pytest.approx(whole[done:], rel=1e-5)
