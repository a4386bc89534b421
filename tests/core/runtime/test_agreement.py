"""Ranks that differ are told, all of them and within seconds, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import megatron_magi as magi
from megatron_magi import HeadShape, masks
from megatron_magi.core.runtime import agreement, agreement_channel, agreement_group
from megatron_magi.core.runtime.agreement_signature import (
    KINDS,
    SIGNATURE_LEN,
    Call,
    describe_difference,
    plan_part,
    signature_of,
)
from megatron_magi.core.runtime.agreement_watcher import Watcher
from tests.core.runtime import agreement_jobs as jobs
from tests.process_pool import pool

WORLD = 5
PLAN = plan_part(magi.plan(masks.causal(8), 1, HeadShape(2, 1, 4)))

ODD = {
    jobs.undispatch_of_another_plan: "plan the same thing; ranks [2] differ from rank 0 in mask",
    jobs.gradient_of_another_batch: "in mask, token layout (backward of dispatch, call",
    jobs.roll_by_another_shift: "rank 0 has row [1, 4], torch.float32, shift 1, rank 2 has row "
    "[1, 4], torch.float32, shift 2",
    jobs.roll_of_another_dtype: "rank 2 has row [1, 4], torch.float64",
    jobs.attention_of_another_scale: "softmax_scale 0.25, no gradient to come, rank 2 has row "
    "[1, 4, 4], torch.float32, softmax_scale 0.5",
    jobs.attention_of_another_dtype: "rank 2 has row [1, 4, 4], torch.float64",
    jobs.attention_of_other_heads: "ranks [2] differ from rank 0 in head_shape",
    jobs.gradient_on_some_ranks: "a gradient to come, rank 2 has row [1, 4, 4], torch.float32, "
    "softmax_scale 0.5, no gradient to come",
    jobs.largest_logits_of_another_scale: "dist_attn_and_max_logits; ranks [2] differ from rank 0",
    jobs.largest_logits_on_some_ranks: "is dist_attn_and_max_logits on rank 0 and dist_attn on",
    jobs.another_call: "is dist_attn on rank 0 and undispatch on rank 2",
    jobs.another_sum_of_gradients: "is_partial_grad False, rank 2 has row [1, 4], torch.float32, "
    "is_partial_grad True",
}


@pytest.mark.parametrize("action", ODD, ids=lambda action: action.__name__)
def test_every_rank_is_told_what_differs(action: jobs.Action) -> None:
    for said in pool(WORLD).run(jobs.odd_rank, 3, action, timeout_s=90)[:3]:
        assert ODD[action] in said, said


def test_a_dropped_batch_shifts_no_comparison() -> None:
    pool(WORLD).run(jobs.unequal_dispatches, 3)


def test_groups_of_the_same_ranks_do_not_meet() -> None:
    pool(WORLD).run(jobs.groups_of_the_same_ranks, 3)


def test_a_channel_ends_with_its_group() -> None:
    pool(WORLD).run(jobs.ends_with_its_group, 2)


def test_a_forked_child_ends() -> None:
    assert pool(WORLD).run(jobs.forked_child, 2)[:2] == [0, 0]


def test_a_device_does_not_wait_and_is_told_by_the_next_call() -> None:
    for said in pool(WORLD).run(jobs.on_a_device, 2)[:2]:
        first, second, error = said
        assert (first, second) == ("waits True", "waits False")
        assert "is_partial_grad False, rank 1 has row [], is_partial_grad True" in error


def test_buffers_do_not_grow_with_the_calls() -> None:
    pool(WORLD).run(jobs.many_on_a_device, 2, 100)


def test_a_host_that_waits_for_its_device_is_ended(tmp_path: Path) -> None:
    hosts = [jobs.start_host(jobs.stuck_host, rank, str(tmp_path / "store")) for rank in range(2)]
    for host in hosts:
        _, said = host.communicate(timeout=50)
        assert host.returncode == 1
        assert (
            "AgreementError" in said and "undispatch on rank 0 and shift_tokens on rank 1" in said
        )


def test_a_rank_may_end_before_another_one(tmp_path: Path) -> None:
    """It sends its last calls first, so that the watcher of one that lives on is content."""
    store = str(tmp_path / "store")
    hosts = [jobs.start_host(jobs.host_that_ends, rank, store) for rank in range(2)]
    for host in hosts:
        _, said = host.communicate(timeout=50)
        assert host.returncode == 0 and "AgreementError" not in said, said


def test_a_group_may_end_on_one_rank_before_another() -> None:
    assert pool(WORLD).run(jobs.ends_before_another, 3)[:3] == [[], [], []]


def test_a_rank_that_waits_alone_is_answered() -> None:
    """By watchers, which look once a second."""
    assert pool(WORLD).run(jobs.waits_alone, 3)[0] < 4


@pytest.mark.parametrize("seed", range(4))
def test_early_watchers_do_no_harm(seed: int) -> None:
    said = pool(WORLD).run(jobs.early_watchers, 3, -1, seed)[:3]
    assert said == ["no error"] * 3


@pytest.mark.parametrize("odd_call", [0, 7, 77, 149])
def test_a_difference_is_found_whoever_is_early(odd_call: int) -> None:
    for said in pool(WORLD).run(jobs.early_watchers, 3, odd_call, odd_call)[:3]:
        assert f"rank 2 has row [], shift 2 (call {odd_call} of this group" in said


def test_heads_that_were_not_planned_are_refused() -> None:
    plan = magi.plan(masks.causal(16), 1, HeadShape(4, 2, 8))
    q, k = torch.zeros(16, 4, 8), torch.zeros(16, 2, 8)
    magi.dist_attn(q, k, k, plan, None)
    for bad in ((q[:, :2], k, k), (q, k[:, :1], k[:, :1]), (q, k, k[..., :4]),
                (q[..., :4], k[..., :4], k)):  # fmt: skip
        with pytest.raises(ValueError, match=r"heads that were planned, 4/2x8"):
            magi.dist_attn(*bad, plan, None)


@pytest.mark.parametrize("kind", KINDS)
def test_any_part_of_a_call_makes_another_signature(kind: str) -> None:
    call = Call(kind, (2, 8, 8), torch.bfloat16, 0.25, 1)
    others = [
        Call(KINDS[KINDS.index(kind) - 1], (2, 8, 8), torch.bfloat16, 0.25, 1),
        Call(kind, (2, 8), torch.bfloat16, 0.25, 1),
        Call(kind, (2, 8, 8, 0), torch.bfloat16, 0.25, 1),
        Call(kind, (0, 2, 8, 8), torch.bfloat16, 0.25, 1),
        Call(kind, (1 << 20, 8, 8), torch.bfloat16, 0.25, 1),
        Call(kind, (2, 8, 8, 1, 1), torch.bfloat16, 0.25, 1),
        Call(kind, (2, 8, 8), torch.float16, 0.25, 1),
        Call(kind, (2, 8, 8), torch.bfloat16, 0.25 + 2**-50, 1),
        Call(kind, (2, 8, 8), torch.bfloat16, 0.25, -1),
    ]
    signatures = [signature_of(c, PLAN, 7) for c in (call, *others)]
    assert all(len(signature) == SIGNATURE_LEN for signature in signatures)
    assert len({*signatures, signature_of(call, PLAN, 8)}) == len(others) + 2
    for other in signatures[1:]:
        said = describe_difference(np.array([signatures[0], signatures[0], other]), "ranks", 1)
        assert "[2]" in said or "on rank 2" in said


class Late:
    """A closed channel that can end after some tries."""

    def __init__(self, tries: int) -> None:
        self.tries = tries

    def close(self) -> None:
        self.tries -= 1
        if self.tries >= 0:
            agreement_channel._unfinished.append(self)  # type: ignore[arg-type]


def test_the_end_of_the_process_waits_for_what_is_under_way() -> None:
    channels = [Late(tries) for tries in (0, 3, 10**9)]
    agreement_channel._unfinished.extend(channels)  # type: ignore[arg-type]
    begin = time.monotonic()
    agreement_channel.close_unfinished(0.3)
    assert 0.3 <= time.monotonic() - begin < 20
    assert list(agreement_channel._unfinished) == channels[2:]
    agreement_channel._unfinished.clear()
    assert [c.tries for c in channels[:2]] == [-1, -1]


def test_rows_of_four_dimensions_are_shown() -> None:
    """And of more are compared, though not shown."""
    shapes = [(2, 3, 4, 5), (2, 3, 4, 6)], [(1, 2, 3, 4, 5), (1, 2, 3, 4, 6)]
    said = []
    for pair in shapes:
        signatures = [signature_of(Call("undispatch", s, torch.float32), PLAN, 0) for s in pair]
        said.append(describe_difference(np.array(signatures), "ranks", 1))
    assert "row [2, 3, 4, 5], torch.float32" in said[0] and "row [2, 3, 4, 6]" in said[0]
    assert said[1]


def test_a_channel_whose_owner_waits_is_left_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is held by a thread that waits for other ranks: nobody may wait for that thread."""
    held, free = (SimpleNamespace(lock=threading.Lock(), channel=object()) for _ in range(2))
    gone = SimpleNamespace(lock=threading.Lock(), channel=None)
    left: list[object] = []
    free.retire = lambda: left.append("retired")
    for state in (held, gone):
        state.lock.acquire()
    monkeypatch.setattr(agreement, "_states", dict(enumerate((held, gone, free))))
    monkeypatch.setattr(agreement, "EXIT_PATIENCE_S", 0.01)
    monkeypatch.setattr(agreement, "leave_running", left.append)
    monkeypatch.setattr(agreement._watcher, "stop", lambda: None)
    agreement._close_all()
    assert left == [held.channel, "retired"]


def test_a_scale_of_minus_zero_is_zero() -> None:
    """Whichever of the two a rank has seen first, which it remembers for both."""
    of_zeros = [signature_of(Call("shift_tokens", scale=x), PLAN, 0) for x in (-0.0, 0.0)]
    assert of_zeros[0] == of_zeros[1] and of_zeros[0][6] == 0


def test_every_size_of_a_row_counts() -> None:
    """Beyond 16 bits of a dimension too, where its packed form would repeat."""
    shapes = [(size, 64) for size in (1, 1 + 2**16, 1 + 2**17)]
    assert len({signature_of(Call("undispatch", shape), PLAN, 0) for shape in shapes}) == len(
        shapes
    )


def test_a_watcher_has_ended_when_it_was_stopped() -> None:
    watcher = Watcher(list)
    watcher.start()
    thread = watcher._thread
    assert thread is not None and thread.is_alive()
    watcher.stop()
    assert not thread.is_alive()


ENDS_WITH_A_RUNNING_CHANNEL = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.on_exit(libc.abort, None)  # as the destructor of a static object that a thread still uses
from megatron_magi.core.runtime import agreement_channel
class Busy:
    close = lambda self: agreement_channel._unfinished.append(self)
agreement_channel.EXIT_PATIENCE_S = 0.01
agreement_channel._unfinished.append(Busy())
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


def test_every_exchange_of_rows_is_compared() -> None:
    """Once, in both directions; dispatch itself exchanges nothing."""
    for counts in pool(WORLD).run(jobs.every_exchange, 2)[:2]:
        assert counts.pop("dispatch") == 0
        assert set(counts.values()) == {1}, counts
        assert len(counts) == 7


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_failed_comparison_closes_its_channel(is_gone: bool) -> None:
    """The next call opens another one, at the same place on every rank."""
    closed = []
    signatures = [
        signature_of(Call("shift_tokens", (4,), extra=shift), PLAN, 0) for shift in (1, 2)
    ]

    def receive(timeout_s: float) -> np.ndarray:
        if is_gone:
            raise RuntimeError("a peer is gone")
        return np.array(signatures)

    channel = SimpleNamespace(receive=receive, close=lambda: closed.append(True))
    state = agreement_group.GroupState(0, "ranks", 1.0, channel)  # type: ignore[arg-type]
    with pytest.raises(
        agreement_group.AgreementError, match="a peer is gone" if is_gone else "shift 2"
    ):
        state._receive(channel, 1.0)  # type: ignore[arg-type]
    assert closed == [True] and state.channel is None


def test_what_the_watcher_found_ends_a_step() -> None:
    """Once, also where nothing else is under way."""
    state = agreement_group.GroupState(0, "ranks", 1.0)
    state.failure = agreement_group.AgreementError("rank 3 differs")
    with pytest.raises(agreement_group.AgreementError, match="rank 3 differs"):
        state.finish(1.0)
    state.finish(1.0)


def test_a_sum_of_gradients_is_not_meant_unless_said() -> None:
    calls = Call("undispatch", (4,)), Call("undispatch", (4,), extra=1)
    said = describe_difference(np.array([signature_of(c, PLAN, 0) for c in calls]), "ranks", 0)
    assert said.index("is_partial_grad False") < said.index("is_partial_grad True")
