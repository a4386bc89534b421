"""The starter of local ranks and signals."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from megatron_magi.training.process.processes import Place, run_local
from megatron_magi.training.process.stop import StopRequest


def _until_signalled(place: Place) -> None:
    with StopRequest() as stop:
        Path(f"{place.init_method.removeprefix('file://')}.{place.rank}").touch()
        if place.rank == 0:  # the parent's signal, once every rank listens
            folder = Path(place.init_method.removeprefix("file://")).parent
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


def test_the_starter_hands_its_signal_to_every_rank() -> None:
    assert run_local(_until_signalled, 2) == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_killed_rank_ends_the_run_with_a_shells_exit_code() -> None:
    begin = time.monotonic()
    assert run_local(_killed, 2) == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 40
