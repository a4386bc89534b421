"""Ranks that differ are told, all of them and within seconds, and nothing else is."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_magi as magi
from megatron_magi import HeadShape, masks
from megatron_magi.core.runtime.agreement import comparison
from tests.core.runtime.agreement import actions, device_jobs, jobs
from tests.process_pool import pool

WORLD = 5

ODD = {
    actions.undispatch_of_another_plan: "plan the same thing; ranks [2] differ from rank 0 in mask",
    actions.gradient_of_another_batch: "in mask, token layout (backward of dispatch, call",
    actions.roll_by_another_shift: "rank 0 has row [1, 4], torch.float32, shift 1, rank 2 has row "
    "[1, 4], torch.float32, shift 2",
    actions.roll_of_another_dtype: "rank 2 has row [1, 4], torch.float64",
    actions.attention_of_another_scale: "softmax_scale 0.25, no gradient to come, rank 2 has row "
    "[1, 4, 4], torch.float32, softmax_scale 0.5",
    actions.attention_of_another_softcap: "softcap 30.1, no gradient to come, rank 2 has row "
    "[1, 4, 4], torch.float32, softmax_scale 0.5, softcap 50, no gradient to come",
    actions.sinks_on_some_ranks: "softmax_scale 0.5, shared sinks, no gradient to come, rank 2 has "
    "row [1, 4, 4], torch.float32, softmax_scale 0.5, no gradient to come",
    actions.sinks_per_token_on_some_ranks: "shared sinks, no gradient to come, rank 2 has row "
    "[1, 4, 4], torch.float32, softmax_scale 0.5, sinks per token, no gradient to come",
    actions.another_batch: "must take the same batch; ranks [2] hold other tokens, or another "
    "batch_id, than rank 0",
    actions.attention_of_another_dtype: "rank 2 has row [1, 4, 4], torch.float64",
    actions.attention_of_other_heads: "ranks [2] differ from rank 0 in head_shape",
    actions.gradient_on_some_ranks: "a gradient to come, rank 2 has row [1, 4, 4], torch.float32, "
    "softmax_scale 0.5, no gradient to come",
    actions.largest_logits_of_another_scale: "dist_attn_and_max_logits; ranks [2] differ from "
    "rank 0",
    actions.largest_logits_on_some_ranks: "is dist_attn_and_max_logits on rank 0 and dist_attn on",
    actions.another_call: "is dist_attn on rank 0 and undispatch on rank 2",
    actions.another_sum_of_gradients: "is_partial_grad False, rank 2 has row [1, 4], "
    "torch.float32, is_partial_grad True",
}


@pytest.mark.parametrize("action", ODD, ids=lambda action: action.__name__)
def test_every_rank_is_told_what_differs(action: actions.Action) -> None:
    for said in pool(WORLD).run(jobs.odd_rank, 3, action, timeout_s=90)[:3]:
        assert ODD[action] in said, said


def test_a_dropped_batch_shifts_no_comparison() -> None:
    pool(WORLD).run(jobs.unequal_dispatches, 3)


def test_training_follows_an_evaluation_that_opened_the_channel() -> None:
    pool(WORLD).run(jobs.inference_first, 2)


def test_groups_of_the_same_ranks_do_not_meet() -> None:
    pool(WORLD).run(jobs.groups_of_the_same_ranks, 3)


def test_a_channel_ends_with_its_group() -> None:
    pool(WORLD).run(jobs.ends_with_its_group, 2)


def test_a_forked_child_ends() -> None:
    assert pool(WORLD).run(jobs.forked_child, 2)[:2] == [0, 0]


def test_a_device_does_not_wait_and_is_told_by_the_next_call() -> None:
    for said in pool(WORLD).run(device_jobs.on_a_device, 2)[:2]:
        first, second, error = said
        assert (first, second) == ("waits True", "waits False")
        assert "is_partial_grad False, rank 1 has row [], is_partial_grad True" in error


def test_buffers_do_not_grow_with_the_calls() -> None:
    pool(WORLD).run(device_jobs.many_on_a_device, 2, 100)


def test_a_host_that_waits_for_its_device_is_ended(tmp_path: Path) -> None:
    for code, said in device_jobs.ends_of_hosts(device_jobs.stuck_host, tmp_path):
        assert code == 1 and "AgreementError" in said
        assert "undispatch on rank 0 and shift_tokens on rank 1" in said


def test_a_rank_may_end_before_another_one(tmp_path: Path) -> None:
    """It sends its last calls first, so that the watcher of one that lives on is content."""
    for code, said in device_jobs.ends_of_hosts(device_jobs.host_that_ends, tmp_path):
        assert code == 0 and "AgreementError" not in said, said


def test_a_group_may_end_on_one_rank_before_another() -> None:
    assert pool(WORLD).run(device_jobs.ends_before_another, 3)[:3] == [[], [], []]


def test_a_rank_that_waits_alone_is_answered() -> None:
    """By watchers, which look once a second."""
    assert pool(WORLD).run(device_jobs.waits_alone, 3)[0] < 4


@pytest.mark.parametrize("seed", range(4))
def test_early_watchers_do_no_harm(seed: int) -> None:
    said = pool(WORLD).run(device_jobs.early_watchers, 3, -1, seed)[:3]
    assert said == ["no error"] * 3


@pytest.mark.parametrize("odd_call", [0, 7, 77, 149])
def test_a_difference_is_found_whoever_is_early(odd_call: int) -> None:
    for said in pool(WORLD).run(device_jobs.early_watchers, 3, odd_call, odd_call)[:3]:
        assert f"rank 2 has row [], shift 2 (call {odd_call} of this group" in said


def test_heads_that_were_not_planned_are_refused() -> None:
    plan = magi.plan(masks.causal(16), 1, HeadShape(4, 2, 8))
    q, k = torch.zeros(16, 4, 8), torch.zeros(16, 2, 8)
    magi.dist_attn(q, k, k, plan, None)
    for bad in ((q[:, :2], k, k), (q, k[:, :1], k[:, :1]), (q, k, k[..., :4]),
                (q[..., :4], k[..., :4], k)):  # fmt: skip
        with pytest.raises(ValueError, match=r"heads that were planned, 4/2x8"):
            magi.dist_attn(*bad, plan, None)


def test_a_channel_whose_owner_waits_is_left_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is held by a thread that waits for other ranks: nobody may wait for that thread."""
    held, free = (SimpleNamespace(lock=threading.Lock(), channel=object()) for _ in range(2))
    gone = SimpleNamespace(lock=threading.Lock(), channel=None)
    left: list[object] = []
    free.retire = lambda: left.append("retired")
    for state in (held, gone):
        state.lock.acquire()
    monkeypatch.setattr(comparison, "_states", dict(enumerate((held, gone, free))))
    monkeypatch.setattr(comparison, "EXIT_PATIENCE_S", 0.01)
    monkeypatch.setattr(comparison, "leave_running", left.append)
    monkeypatch.setattr(comparison._watcher, "stop", lambda: None)
    comparison._close_all()
    assert left == [held.channel, "retired"]


def test_every_exchange_of_rows_is_compared() -> None:
    """Once, in both directions; dispatch itself exchanges nothing."""
    for counts in pool(WORLD).run(jobs.every_exchange, 2)[:2]:
        assert counts.pop("dispatch") == 0
        assert set(counts.values()) == {1}, counts
        assert len(counts) == 7
