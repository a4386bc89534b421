"""A channel sends what it must, and ends without anything being destroyed below its threads."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator

import pytest

from megatron_magi.core.runtime.agreement import channel as module
from megatron_magi.core.runtime.agreement.channel import Channel, close_unfinished
from megatron_magi.core.runtime.agreement.signature import SIGNATURE_LEN
from megatron_magi.core.runtime.agreement.stream import BATCH
from tests.core.runtime.agreement.gathers import Gloo, channel_of


class Late:
    """A closed channel that can end after some tries."""

    def __init__(self, tries: int) -> None:
        self.tries = tries

    def close(self) -> None:
        self.tries -= 1
        if self.tries >= 0:
            module._unfinished.append(self)  # type: ignore[arg-type]


def test_the_end_of_the_process_waits_for_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Channels that other tests have closed may still be waiting in the real list.
    monkeypatch.setattr(module, "_unfinished", deque())
    channels = [Late(tries) for tries in (0, 3, 10**9)]
    module._unfinished.extend(channels)  # type: ignore[arg-type]
    begin = time.monotonic()
    module.close_unfinished(0.3)
    assert 0.3 <= time.monotonic() - begin < 20
    assert list(module._unfinished) == channels[2:]
    assert [c.tries for c in channels[:2]] == [-1, -1]


ENDS_WITH_A_RUNNING_CHANNEL = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.on_exit(libc.abort, None)  # as the destructor of a static object that a thread still uses
from megatron_magi.core.runtime.agreement import channel as module
class Busy:
    close = lambda self: module._unfinished.append(self)
module.EXIT_PATIENCE_S = 0.01
module._unfinished.append(Busy())
libc.printf(b"of C, ")
print("of Python", end="")
sys.exit(3)
"""


def test_nothing_is_destroyed_below_a_channel_that_runs() -> None:
    """The process ends with its code, and what it has written is there."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WITH_A_RUNNING_CHANNEL], capture_output=True, text=True
    )
    assert ended.returncode == 3, ended.stderr
    assert sorted(ended.stdout) == sorted("of C, of Python")


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Two ranks' ends of one group."""
    gloo = Gloo(2)
    yield channel_of(gloo, 0), channel_of(gloo, 1)
    module._unfinished.clear()


def post(channel: Channel, number: int, content: int = 0) -> None:
    channel.post((number, content, *[0] * (SIGNATURE_LEN - 2)))


def test_a_full_batch_is_sent_at_once(pair: tuple[Channel, Channel]) -> None:
    first, second = pair
    for number in range(BATCH):
        assert not first.pending
        post(first, number)
    assert len(first.pending) == 1 and not first.streams.unsent and not first.is_ready()
    second.send()
    assert first.is_ready() and first.receive(1.0) is None
    assert first.streams.lengths == [BATCH, 0] and not first.pending


def test_buffers_are_used_again(pair: tuple[Channel, Channel]) -> None:
    for number in range(3):
        for channel in pair:
            post(channel, number)
            channel.send()
        for channel in pair:
            assert channel.receive(1.0) is None
    assert [len(channel.free) for channel in pair] == [1, 1]


def test_a_difference_is_told_to_both(pair: tuple[Channel, Channel]) -> None:
    for rank, channel in enumerate(pair):
        post(channel, 0)
        post(channel, 1, content=rank)
        channel.send()
    for channel in pair:
        difference = channel.receive(1.0)
        assert difference is not None and difference[:, :2].tolist() == [[1, 0], [1, 1]]


def test_a_rank_that_leads_sends_an_empty_block(pair: tuple[Channel, Channel]) -> None:
    """Only once: while that one is under way it waits."""
    first, second = pair
    second.send_rest()
    assert not second.pending, "there is nothing to send, and nobody is behind"
    post(first, 0)
    first.send()
    second.send()
    first.receive(1.0)
    for _ in range(2):
        first.send_rest()
    assert len(first.pending) == 1 and first.streams.leads()


def test_a_channel_ends_when_its_gathers_have_ended(pair: tuple[Channel, Channel]) -> None:
    first, second = pair
    first.send()
    first.close()
    close_unfinished()
    assert first.group is not None and list(module._unfinished) == [first]
    second.send()
    close_unfinished()
    assert first.group is None and not first.pending and not module._unfinished


def test_a_retired_channel_first_sends_its_calls(pair: tuple[Channel, Channel]) -> None:
    """The other rank gets them, although nobody calls on this one any more."""
    first, second = pair
    post(second, 0)
    second.send()
    post(first, 0)
    first.retire()
    assert second.is_ready() and second.receive(1.0) is None
    assert second.streams.lengths == [1, 1]
    close_unfinished()
    assert first.group is None and not module._unfinished


def test_a_fork_leaves_its_parents_channels(pair: tuple[Channel, Channel]) -> None:
    first, _ = pair
    first.send()
    first.close()
    references, lock = sys.getrefcount(first), module._ending
    module.forget_in_child()
    assert not module._unfinished and module._ending is not lock
    assert sys.getrefcount(first) == references, "one more that nobody gives back, one less here"
