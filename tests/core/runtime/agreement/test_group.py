"""What a group of ranks has compared, and how an error of its channel reaches a call."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import megatron_magi as magi
from megatron_magi import HeadShape, masks
from megatron_magi.core.runtime.agreement import group
from megatron_magi.core.runtime.agreement.group import MAX_PENDING, AgreementError, GroupState
from megatron_magi.core.runtime.agreement.signature import Call, plan_part, signature_of
from tests.core.runtime.agreement.gathers import Gloo, channel_of

PLAN = plan_part(magi.plan(masks.causal(8), 1, HeadShape(2, 1, 4)))


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
    state = GroupState(0, "ranks", 1.0, channel)  # type: ignore[arg-type]
    with pytest.raises(AgreementError, match="a peer is gone" if is_gone else "shift 2"):
        state._receive(channel, 1.0)  # type: ignore[arg-type]
    assert closed == [True] and state.channel is None


def test_a_call_whose_channel_another_thread_closed_meanwhile() -> None:
    with pytest.raises(AgreementError, match="from one thread at a time"):
        GroupState(0, "ranks", 1.0).post(Call("plan"), PLAN, at_once=True)


def test_what_the_watcher_found_ends_a_step() -> None:
    """Once, also where nothing else is under way."""
    state = GroupState(0, "ranks", 1.0)
    state.failure = AgreementError("rank 3 differs")
    with pytest.raises(AgreementError, match="rank 3 differs"):
        state.finish(1.0)
    state.finish(1.0)


class Pending(SimpleNamespace):
    """A channel with gathers under way, of which the first ``num_ready`` have ended."""

    def receive(self, timeout_s: float) -> None:
        self.num_ready -= 1
        self.pending.pop(0)

    def is_ready(self) -> bool:
        return bool(self.num_ready > 0)


def pending(count: int, num_ready: int) -> Pending:
    return Pending(pending=[*range(count)], num_ready=num_ready, retire=lambda: None)


@pytest.mark.parametrize(
    "count, num_ready, left",
    [
        (5, 0, 5),
        (5, 3, 2),
        (MAX_PENDING, 0, MAX_PENDING - 1),
        (MAX_PENDING + 4, 2, MAX_PENDING - 1),
    ],
)
def test_a_call_waits_only_behind_many_gathers(count: int, num_ready: int, left: int) -> None:
    channel = pending(count, num_ready)
    GroupState(0, "ranks", 1.0, channel).look(1.0)  # type: ignore[arg-type]
    assert len(channel.pending) == left


def test_what_the_watcher_meets_is_kept_for_the_next_call() -> None:
    def receive(timeout_s: float) -> None:
        raise RuntimeError("a peer is gone")

    channel = SimpleNamespace(receive=receive, is_ready=lambda: True, close=lambda: None)
    state = GroupState(3, "ranks", 1.0, channel)  # type: ignore[arg-type]
    state.serve()
    with pytest.raises(AgreementError, match=r"seen by rank 3.*a peer is gone") as caught:
        state.look(1.0)
    assert caught.value.__cause__ is None, "one traceback, with the cause in the line"
    state.look(1.0)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_call_is_sent_at_once_only_if_it_must_be(at_once: bool) -> None:
    """Else together with later ones."""
    channel = channel_of(Gloo(2), 0)
    state = GroupState(0, "ranks", 1.0, channel)
    for number in range(2):
        state.post(Call("dist_attn"), PLAN, at_once=at_once)
        assert channel.streams.num_calls == number + 1
    assert len(channel.pending) == (2 if at_once else 0)
    assert bool(channel.streams.unsent) is not at_once


def test_a_group_that_ends_retires_its_channel() -> None:
    retired: list[bool] = []
    state = GroupState(0, "ranks", 1.0, SimpleNamespace(retire=lambda: retired.append(True)))  # type: ignore[arg-type]
    state.retire()
    state.retire()
    assert retired == [True] and state.channel is None


@pytest.mark.parametrize("count", [0, 1])
def test_the_watcher_sends_one_gather_at_a_time(count: int) -> None:
    channel, sent = pending(count, 0), []
    channel.send_rest = lambda: sent.append(True)
    GroupState(0, "ranks", 1.0, channel).serve()  # type: ignore[arg-type]
    assert len(sent) == 1 - count


def test_the_plans_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "MAX_AGREED", 2)
    plans = [magi.plan(masks.causal(length), 1, HeadShape(2, 1, 4)) for length in (8, 9, 10)]
    state = GroupState(0, "ranks", 1.0)
    assert [state.note_plan(plan) for plan in plans[:2]] == [plan_part(plan) for plan in plans[:2]]
    state.note_plan(plans[0])
    state.note_plan(plans[2])
    assert [*state.noted] == [plans[0].digest, plans[2].digest]
    state.retire()
    assert not state.noted, "another channel compares them again"
