"""The starter of local ranks and signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from megatron_magi.training.process.processes import Place, run_local
from megatron_magi.training.process.stop import StopRequest


def _until_signalled(folder: Path, place: Place) -> None:
    with StopRequest() as stop:
        (folder / str(place.rank)).touch()
        if place.rank == 0:  # the parent's signal, once every rank listens
            while len(list(folder.iterdir())) < place.world_size:
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGINT)
        deadline = time.monotonic() + 30
        while not stop.signal_number and time.monotonic() < deadline:
            time.sleep(0.01)
    sys.exit(0 if stop.signal_number == signal.SIGTERM else 3)


def _killed(place: Place) -> None:
    if place.rank:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def _orphan(folder: Path, place: Place) -> None:
    """Wait for a signal, and say that it came."""
    with StopRequest() as stop:
        (folder / f"pid{place.rank}").write_text(str(os.getpid()))
        while not stop.signal_number:
            time.sleep(0.01)
    (folder / f"ended{place.rank}").touch()


def _start(folder: Path) -> None:
    run_local(partial(_orphan, folder), 2)


def test_the_starter_hands_its_signal_to_every_rank(tmp_path: Path) -> None:
    assert run_local(partial(_until_signalled, tmp_path), 2) == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_killed_rank_ends_the_run_with_a_shells_exit_code() -> None:
    begin = time.monotonic()
    assert run_local(_killed, 2) == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 40


def test_ranks_whose_starter_was_killed_end_by_a_signal(tmp_path: Path) -> None:
    starter = multiprocessing.get_context("spawn").Process(target=_start, args=(tmp_path,))
    starter.start()
    _wait_for(tmp_path, "pid?")
    starter.kill()
    starter.join()
    _wait_for(tmp_path, "ended?")


def _wait_for(folder: Path, names: str) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob(names))) < 2:
        if time.monotonic() > deadline:
            pytest.fail(f"{names} after a minute: {sorted(folder.iterdir())}")
        time.sleep(0.02)
