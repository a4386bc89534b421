"""Reduces with a communicator of their own, over gloo: equal bits, one order on all ranks, groups
of subsets, and failures."""

from collections.abc import Iterator

import pytest

from tests.core.runtime import reduce_jobs as jobs
from tests.process_pool import ProcessPool, pool

WORLD = 5


@pytest.mark.parametrize("cp_size, degree", [(3, 5), (5, 4), (2, "at_once")])
def test_equal_bits_and_the_dense_answer(cp_size: int, degree: int | str) -> None:
    pool(WORLD).run(jobs.both_ways, cp_size, degree, 1)


@pytest.mark.slow
@pytest.mark.parametrize("degree, nodes", [(4, 1), (5, 2)])
def test_eight_ranks(degree: int, nodes: int) -> None:
    workers = ProcessPool(8)
    try:
        workers.run(jobs.both_ways, 8, degree, nodes, timeout_s=240)
    finally:
        workers.stop()


def test_relays_among_nodes() -> None:
    pool(WORLD).run(jobs.both_ways, 4, 4, 2)


@pytest.mark.parametrize("name", ["causal", "full", "packed", "window"])
@pytest.mark.parametrize("degree", [4, 5])
def test_every_rank_begins_the_same_exchanges_in_one_order(name: str, degree: int) -> None:
    first, *others = pool(WORLD).run(jobs.order_of_exchanges, 4, degree, name)[:4]
    assert all(other == first for other in others)
    casts = first.count("cast")
    assert casts >= 4
    # Gradients leave before the host waits for keys.
    turns = ["cast", "reduce", "wait"] * (casts - 2)
    assert first == ["cast", "cast", "wait", *turns, "reduce", "wait", "reduce"]


def test_a_slot_is_sent_before_another_exchange_takes_it() -> None:
    begun = pool(WORLD).run(jobs.order_of_exchanges, 4, 4, "full", False)[0]
    turn = ["wait", "reduce", "cast"]
    assert begun == ["cast", "cast", *turn, *turn, "wait", "reduce", "wait", "reduce"]


def test_three_casts_or_none_need_no_second_communicator() -> None:
    pool(WORLD).run(jobs.without_a_fourth_cast, 3)


def test_groups_of_subsets() -> None:
    pool(WORLD).run(jobs.subsets, WORLD)


def test_a_communicator_ends_with_its_parent() -> None:
    pool(WORLD).run(jobs.ends_with_its_parent, WORLD)


def test_a_forked_child_ends() -> None:
    assert pool(WORLD).run(jobs.forked_child, 2)[:2] == [0, 0]


def test_exchanges_of_both_are_under_way_together() -> None:
    pool(WORLD).run(jobs.casts_and_reduces_at_once, 4)


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPool]:
    """Three ranks for failures alone, the last of which ends them."""
    made = ProcessPool(3)
    yield made
    made.stop()


def test_a_rank_that_does_not_open_it_is_an_error(workers: ProcessPool) -> None:
    *stayed, _ = workers.run(jobs.absent_at_the_opening, 3, timeout_s=60)
    for error in stayed:
        assert "all ranks [0, 1, 2] must begin their backward within 2 s" in error


def test_a_rank_that_hangs_in_a_reduce_is_an_error_within_the_time_out(
    workers: ProcessPool,
) -> None:
    """That of the parent group, 4 s."""
    *stayed, _ = workers.run(jobs.fails_in_a_reduce, 3, "hangs", timeout_s=60)
    for error, seconds in stayed:
        assert error != "no error" and seconds < 8


def test_a_rank_that_dies_in_a_reduce_is_an_error(workers: ProcessPool) -> None:
    with pytest.raises(AssertionError, match=r"dead: \[2\]"):
        workers.run(jobs.fails_in_a_reduce, 3, "dies", timeout_s=30)
