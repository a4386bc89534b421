"""Steps, replicas and microbatches get equal costs, every sample once, and none moves too far."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from megatron_magi.balance.deal import CLOSE_ENOUGH
from megatron_magi.balance.deal import deal_rows as deal
from megatron_magi.training.data.packed_samples import microbatch_indices
from megatron_magi.training.data.step_order import (
    StepOrder,
    StepShape,
    pipeline_order,
    plan_steps,
    share_steps,
)


def random_shapes(count: int) -> Iterator[tuple[np.ndarray, StepShape]]:
    rng = np.random.default_rng(3)
    for _ in range(count):
        steps, microbatches, dp = (int(n) for n in rng.integers(1, 7, 3))
        shape = StepShape(steps, microbatches, dp, bool(rng.integers(2)))
        kinds = rng.integers(0, 50, steps * shape.batch), rng.lognormal(20, 2, steps * shape.batch)
        yield kinds[rng.integers(2)].astype(np.int64), shape


def test_every_sample_is_taken_once_and_by_a_pure_function() -> None:
    for costs, shape in random_shapes(200):
        planned = plan_steps(costs, shape)
        assert planned.shape == (shape.num_steps, shape.num_microbatches, shape.dp_size)
        assert sorted(planned.ravel()) == list(range(len(costs)))
        assert np.array_equal(plan_steps(costs.copy(), shape), planned)


def test_steps_are_the_same_for_any_number_of_replicas() -> None:
    """So a checkpoint continues in another layout with the batches that it would have had."""
    costs = np.random.default_rng(0).lognormal(20, 1, 4 * 12).astype(np.int64)
    steps = [
        np.sort(plan_steps(costs, StepShape(4, 12 // dp, dp, pipelined)).reshape(4, -1), axis=1)
        for dp, pipelined in itertools.product((1, 2, 3, 4, 6, 12), (False, True))
    ]
    assert all(np.array_equal(step, steps[0]) for step in steps)
    assert np.array_equal(steps[0], share_steps(costs, 4))


def test_the_sum_of_the_largest_costs_is_the_least_of_all_divisions() -> None:
    for seed in range(20):
        costs = np.random.default_rng(seed).integers(0, 30, 6)
        least = min(
            costs[list(order)].reshape(3, 2).max(axis=1).sum()
            for order in itertools.permutations(range(6))
        )
        assert costs[share_steps(costs, 3)].max(axis=1).sum() == least


def test_one_step_keeps_its_samples_and_equal_costs_stay_in_place() -> None:
    assert share_steps(np.array([3, 9, 1, 5]), 1).tolist() == [[0, 1, 2, 3]]
    same = np.full(24, 7)
    assert np.array_equal(plan_steps(same, StepShape(3, 4, 2, False)).ravel(), np.arange(24))


def test_steps_keep_the_order_of_the_sampler() -> None:
    costs = np.array([1, 9, 1, 9, 5, 5, 5, 5, 1, 9, 1, 9])
    assert share_steps(costs, 3).tolist() == [[0, 2, 8, 10], [4, 5, 6, 7], [1, 3, 9, 11]]


def best_deal(costs: np.ndarray, dp_size: int) -> int:
    """The least largest sum of all divisions into equal counts."""
    orders = itertools.permutations(range(len(costs)))
    return min(int(costs[list(o)].reshape(dp_size, -1).sum(axis=1).max()) for o in orders)


def test_replicas_are_within_a_tenth_of_the_optimum_of_small_steps() -> None:
    for seed in range(12):
        costs = np.random.default_rng(seed).lognormal(10, 1, 6).astype(np.int64)
        for dp_size in (2, 3):
            sums = costs[deal(costs, dp_size)].sum(axis=1)
            assert sums.max() <= 1.1 * best_deal(costs, dp_size)


def test_no_single_trade_with_the_fullest_replica_is_left() -> None:
    for costs, shape in random_shapes(100):
        step = costs[: shape.batch]
        held = step[deal(step, shape.dp_size)]
        sums = held.sum(axis=1)
        full = int(sums.argmax())
        if sums[full] - sums.min() <= sums[full] // CLOSE_ENOUGH:
            continue
        for row in range(shape.dp_size):
            moved = held[full][:, None] - held[row]
            after = np.maximum(sums[full] - moved, sums[row] + moved)
            assert row == full or after.min() >= sums[full]


def test_trades_improve_on_longest_first() -> None:
    """Longest first leaves 9 + 6 + 5 and 7 + 6 + 5."""
    costs = np.array([9, 7, 6, 6, 5, 5])
    assert costs[deal(costs, 2)].sum(axis=1).tolist() == [19, 19]


def test_a_pipeline_begins_and_ends_with_cheap_samples() -> None:
    costs = np.array([5, 1, 4, 2, 3])
    assert costs[pipeline_order(costs)].tolist() == [1, 3, 5, 4, 2]
    for costs, _ in random_shapes(50):
        ran = costs[pipeline_order(costs)]
        top = int(ran.argmax())
        assert sorted(ran) == sorted(costs)
        assert (np.diff(ran[: top + 1]) >= 0).all() and (np.diff(ran[top:]) <= 0).all()


def cost_of(number: int) -> int:
    return (number * 7919 + 13) % 97


@pytest.mark.parametrize(("steps", "first"), [(1, 0), (4, 0), (4, 5)])
def test_a_sample_stays_in_its_group_of_steps(steps: int, first: int) -> None:
    shape = StepShape(steps, 3, 2, False)
    size = steps * shape.batch
    order = StepOrder(cost_of, shape, first)
    taken = [order.sample_at(first + place) for place in range(3 * size)]
    for group in range(3):
        numbers = taken[group * size : (group + 1) * size]
        assert sorted(numbers) == list(range(first + group * size, first + (group + 1) * size))


def test_a_place_has_its_sample_whatever_was_asked_before() -> None:
    """A run that resumes in the middle of a group goes on as if it had never stopped."""
    shape = StepShape(4, 3, 2, True)
    whole = StepOrder(cost_of, shape)
    samples = [whole.sample_at(place) for place in range(60)]
    for start in range(0, 60, 6):
        resumed = StepOrder(cost_of, shape)
        assert [resumed.sample_at(place) for place in range(start, 60)] == samples[start:]


def test_costs_are_found_once_for_a_group() -> None:
    asked: list[int] = []
    order = StepOrder(lambda number: asked.append(number) or number, StepShape(2, 2, 2, False))  # type: ignore[func-returns-value]
    for place in range(12):
        order.sample_at(place)
    assert asked == list(range(16))


def test_replicas_of_a_step_take_places_of_near_equal_cost() -> None:
    shape = StepShape(8, 4, 4, False)
    order = StepOrder(cost_of, shape)
    sums = np.zeros((8, 4))
    for replica in range(4):
        places = microbatch_indices(16, replica, 4)
        for step in range(8):
            sums[step, replica] = sum(cost_of(order.sample_at(next(places))) for _ in range(4))
    assert (sums.max(axis=1) <= 1.05 * sums.mean(axis=1)).all()
    plain = np.array([cost_of(place) for place in range(128)]).reshape(8, 4, 4).sum(axis=1)
    assert (plain.max(axis=1) / plain.mean(axis=1)).mean() > 1.15
