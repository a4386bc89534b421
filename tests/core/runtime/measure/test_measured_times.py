"""Measured times of a plan's stages: their shape, what they count, and their line of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import megatron_magi as magi
from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.core.plan import StageTimes, predict_times
from megatron_magi.core.runtime.measure import measured_times as module
from megatron_magi.core.runtime.measure.measured_times import (
    MeasuredTimes,
    kernel_times,
    measured_times,
    times_text,
)
from tests.process_pool import pool, subgroup

HEADS = HeadShape(4, 2, 16, bytes_per_element=4, head_dim_v=8)
CONFIGS = [
    MagiConfig(overlap_degree=degree, forward_mode=mode, chunk_size=16)
    for degree, mode in ((0, "at_once"), (1, "local_first"), (2, "staged"), (2, "at_once"))
]  # fmt: skip


def on_ranks(rank: int, size: int, config: MagiConfig) -> Any:
    group = subgroup(size)
    if rank >= size:
        return None
    plan = magi.plan(masks.causal(200), group, HEADS, config)
    found = measured_times(plan, group, "cpu")
    shape = predict_times(plan).forward.shape[:2]
    assert found.receive.shape == found.compute.shape == shape
    assert times_text(predict_times(plan), found).count("compute") == shape[1]
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.forward_mode}-{c.overlap_degree}")
def test_ranks_have_the_same_times_of_all(config: MagiConfig) -> None:
    first, second = (x for x in pool(2).run(on_ranks, 2, config) if x is not None)
    for name in ("receive", "compute", "forward", "backward"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
    assert (first.forward > 0).all() and (first.compute.sum(1) > 0).all()
    receiving = first.receive > 0
    assert receiving.any(), "causal chunks are spread over both ranks"
    assert not receiving[:, 0].any() or config.forward_mode == "at_once"
    assert first.forward_us == first.forward.max()


def with_another_size(rank: int, size: int) -> None:
    group = subgroup(size)
    plan = magi.plan(masks.causal(200), size - 1, HEADS)
    if rank < size:
        with pytest.raises(ValueError, match="the plan is for 2 context-parallel ranks, got a gr"):
            measured_times(plan, group, "cpu")


def test_a_group_that_does_not_fit_is_refused_on_every_rank() -> None:
    pool(3).run(with_another_size, 3)


def test_one_rank_receives_nothing_and_each_part_is_timed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(run: Callable[[], object], device: torch.device) -> float:
        run()
        return next(ticks)

    monkeypatch.setattr(module, "least_seconds", seconds)
    plan = magi.plan(masks.causal(64), 1, HEADS)
    ticks = iter([1e-3, 9e-3, 2e-3])  # the stage; forward and backward; forward
    found = measured_times(plan, None, "cpu")
    assert found.receive.tolist() == [[0.0]] and found.compute.tolist() == [[1000.0]]
    assert found.forward.tolist() == [2000.0]
    assert found.backward == pytest.approx([7000.0])
    ticks = iter([1e-3, 4e-3])
    assert kernel_times(plan, 0, "cpu") == pytest.approx((1000.0, 4000.0))


def test_the_text_puts_prediction_and_measurement_of_the_slowest_rank_side_by_side() -> None:
    predicted = StageTimes(
        np.array([[[0, 0, 1, 11], [0, 5, 11, 31]], [[0, 0, 2, 14], [0, 7, 14, 44]]], float),
        np.array([90.0, 80.0]),
    )
    measured = MeasuredTimes(
        np.array([[0.0, 6.0], [0.0, 8.0]]), np.array([[12.0, 22.0], [13.0, 33.0]]),
        np.array([35.0, 51.0]), np.array([95.0, 99.0]),
    )  # fmt: skip
    assert times_text(predicted, measured) == (
        "predicted / measured us: forward 44 / 51, backward 90 / 99; forward stages of rank 1, "
        "each alone: receive 0 / 0, compute 12 / 13; receive 7 / 8, compute 30 / 33"
    )
