"""A signal asks for the end of a run; a second one ends it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from megatron_magi.training.process.stop import StopRequest


def test_a_signal_is_noted_and_a_second_interrupt_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert stop.signal_number == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_number == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) == before
