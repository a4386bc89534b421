"""A thread that ends the process for an error that no call raises, and for no other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from megatron_magi.core.runtime.agreement import watcher as module
from megatron_magi.core.runtime.agreement.watcher import Watcher


def test_a_watcher_has_ended_when_it_was_stopped() -> None:
    watcher = Watcher(list)
    watcher.start()
    thread = watcher._thread
    assert thread is not None and thread.is_alive()
    watcher.stop()
    assert not thread.is_alive()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Let a quick watcher look at these errors, one list a look; the exit codes of the process."""
    monkeypatch.setattr(module, "PERIOD_S", 0.001)
    monkeypatch.setattr(module, "GRACE_S", 0.001)

    def run(*looks: list[str]) -> list[int]:
        left, is_over, codes = [*looks], threading.Event(), list[int]()

        def errors() -> list[str]:
            if not left:
                is_over.set()
                return []
            return left.pop(0)

        watcher = Watcher(errors)
        monkeypatch.setattr(os, "_exit", codes.append)
        watcher.start()
        assert is_over.wait(30)
        watcher.stop()
        return codes

    return run


def test_an_error_that_nobody_raises_ends_the_process(
    watch: Callable[..., list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    found = ["rank 3 differs", "rank 4 is gone"]
    assert watch([], found, found) == [1]
    (record,) = caplog.records
    assert record.levelname == "CRITICAL"
    assert "AgreementError: rank 3 differs; rank 4 is gone. The device waits" in record.message


def test_an_error_that_a_call_raises_in_time_ends_nothing(
    watch: Callable[..., list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    assert watch(["rank 3 differs"], [], [], ["rank 3 differs"], []) == []
    assert not caplog.records


def test_a_watcher_that_is_stopped_in_the_grace_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.001)
    has_looked, codes = threading.Event(), list[int]()
    monkeypatch.setattr(os, "_exit", codes.append)
    watcher = Watcher(lambda: has_looked.set() or ["rank 3 differs"])  # type: ignore[func-returns-value]
    watcher.start()
    assert has_looked.wait(30)
    watcher.stop()
    assert codes == []


def test_a_watcher_has_one_thread() -> None:
    watcher = Watcher(list)
    watcher.start()
    thread = watcher._thread
    watcher.start()
    assert watcher._thread is thread and thread is not None and thread.daemon
    watcher.stop()
