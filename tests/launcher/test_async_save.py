"""`--async-save`: training goes on while a process of Megatron's writes the checkpoint."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron_magi.adapter
from tests.launcher.layouts import CP2, SMALL_SCRIPT
from tests.launcher.tiny_flags import TINY, words

pytestmark = [
    pytest.mark.skipif(
        megatron_magi.adapter.MEGATRON_VERSION[:2] != (0, 19),
        reason="the script is written for megatron.training of the 0.19 wheel",
    ),
    pytest.mark.timeout(300),
]

ROOT = Path(__file__).parents[2]
SIX: dict[str, Any] = {**TINY, **CP2, "train-iters": 6, "no-load-rng": True}


def save(folder: Path) -> dict[str, Any]:
    return {
        "async-save": True,
        "use-persistent-ckpt-worker": True,
        "async-strategy": "mcore",
        "save": str(folder),
        "save-interval": 2,
    }


class Ranks:
    """Two processes of one run."""

    def __init__(self, flags: dict[str, Any]) -> None:
        port = str(_free_port())
        self.processes = [self._start(rank, port, flags) for rank in range(2)]

    def _start(self, rank: int, port: str, flags: dict[str, Any]) -> subprocess.Popen[str]:
        paths = [str(Path(__file__).parent / "no_cuda"), os.environ.get("PYTHONPATH"), str(ROOT)]
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_magi.run", str(SMALL_SCRIPT), *words(flags)],
            env={
                **os.environ,
                **{name: str(value) for name, value in place.items()},
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "MASTER_ADDR": "127.0.0.1",
                "CUDA_VISIBLE_DEVICES": "",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "TORCH_COMPILE_DISABLE": "1",
                "OMP_NUM_THREADS": "1",
                "LAUNCHER_TEST_WITHOUT_CUDA": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def outputs(self) -> list[str]:
        """What they printed, once both have ended well."""
        outputs = [process.communicate(timeout=200)[0] for process in self.processes]
        for process, output in zip(self.processes, outputs, strict=True):
            assert process.returncode == 0, output[-3000:]
        return outputs

    def kill_at(self, words: str) -> None:
        """Kill both, and whatever they started, as soon as the first one prints these words."""
        stream = self.processes[0].stdout
        assert stream is not None, "started with a pipe"
        assert any(words in line for line in stream), f"it never printed {words!r}"
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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
    outputs = Ranks({**SIX, **save(tmp_path), "exit-interval": 4}).outputs()
    assert losses(outputs) == whole[:4]
    assert "scheduled an async checkpoint save at iteration       2" in outputs[0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    resumed = losses(Ranks({**SIX, "load": str(tmp_path), "ckpt-step": 2}).outputs())
    assert after_a_resume(resumed) == pytest.approx(whole[2:], rel=1e-5)


@pytest.mark.slow
def test_a_run_that_is_killed_during_a_save_goes_on_from_the_last_whole_one(
    whole: list[float], tmp_path: Path
) -> None:
    Ranks({**SIX, **save(tmp_path)}).kill_at("async checkpoint save at iteration       4")
    done = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert done in (2, 4)
    resumed = losses(Ranks({**SIX, "load": str(tmp_path)}).outputs())
    assert after_a_resume(resumed) == pytest.approx(whole[done:], rel=1e-5)
