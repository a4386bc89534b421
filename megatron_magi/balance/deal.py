"""Deals the samples of a step to replicas and microbatches.

A function of the costs: it draws no random number and communicates nothing, adds integers only and
sorts stably, so that every machine finds the same dealing.

Shapes: R replicas, M microbatches, B samples in a microbatch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

CLOSE_ENOUGH = 1000
"""Rows whose sums differ by less than this part of the largest are not improved further."""


def deal_step(
    costs: Int64Array,
    replicas: int,
    micro: int,
    *,
    pipelined: bool = False,
    lockstep: bool = False,
) -> Int64Array:
    """Deal the samples of a step, each of them once.

    Args:
        costs: int64 [M * R * B], 0 or more, in Megatron's order: microbatch by microbatch, and in
            each replica by replica. Their sum must be an int64.
        replicas: R.
        micro: B.
        pipelined: whether microbatches pass pipeline stages: the cheapest then come first and last.
        lockstep: whether replicas meet in every layer (experts or weights spread over replicas), so
            that samples of similar cost must share a microbatch. Else only their sums count.

    Returns:
        int64 [R, M, B], indices into `costs`. The fullest replica, or with `lockstep` the sum of
        the fullest replicas of each microbatch, is never above that of Megatron's order.

    Raises:
        ValueError: the samples do not fill whole microbatches of all replicas.
    """
    order = order_of_megatron(len(costs), replicas, micro)
    dealt = (_deal_slots if lockstep else _deal_sums)(costs, replicas, micro)
    if _worst(costs, dealt, lockstep) >= _worst(costs, order, lockstep):
        dealt = order
    return _in_pipeline_order(dealt, costs, lockstep) if pipelined else dealt


def order_of_megatron(count: int, replicas: int, micro: int) -> Int64Array:
    """int64 [R, M, B]: the places of a step's samples as Megatron deals them.

    Raises:
        ValueError: see `deal_step`.
    """
    if not count or count % (replicas * micro):
        raise ValueError(
            f"a step must have a multiple of {replicas} x {micro} samples, got {count}; pass the "
            f"samples of whole microbatches of all replicas"
        )
    places = np.arange(count, dtype=np.int64).reshape(-1, replicas, micro)
    return np.ascontiguousarray(places.transpose(1, 0, 2))


def fullest(costs: Int64Array, dealt: Int64Array, lockstep: bool = False) -> int:
    """Cost of the fullest replica; with `lockstep` the sum over microbatches of the fullest one."""
    held = costs[dealt].sum(axis=2)
    return int(held.max(axis=0).sum() if lockstep else held.sum(axis=1).max())


def _worst(costs: Int64Array, dealt: Int64Array, lockstep: bool) -> tuple[int, int]:
    """Objective of a dealing, to be minimised: the fullest replica, then the fullest microbatch."""
    return fullest(costs, dealt, lockstep), int(costs[dealt].sum(axis=2).max())


def _deal_slots(costs: Int64Array, replicas: int, micro: int) -> Int64Array:
    """Neighbours in cost share a microbatch; inside it, the replicas' sums are nearly equal."""
    slots = np.argsort(-costs, kind="stable").reshape(-1, replicas * micro)
    return np.stack([slot[deal_rows(costs[slot], replicas)] for slot in slots], axis=1)


def _deal_sums(costs: Int64Array, replicas: int, micro: int) -> Int64Array:
    """The replicas' sums are nearly equal, and inside a replica those of its microbatches."""
    rows = deal_rows(costs, replicas)
    return np.stack([row[deal_rows(costs[row], len(row) // micro)] for row in rows])


def deal_rows(costs: Int64Array, num_rows: int) -> Int64Array:
    """int64 [num_rows, n]: indices into `costs`, the sums of the rows nearly equal.

    Longest processing time first with equal counts; then the fullest row trades samples as long as
    a trade lowers the larger sum of both rows.
    """
    count = len(costs) // num_rows
    sums, room = np.zeros(num_rows, np.int64), np.full(num_rows, count)
    rows = np.zeros((num_rows, count), np.int64)
    for index in np.argsort(-costs, kind="stable"):
        row = int(np.argmin(np.where(room > 0, sums, np.iinfo(np.int64).max)))
        rows[row, count - room[row]] = index
        sums[row] += costs[index]
        room[row] -= 1
    while _trade(rows, costs):
        pass
    return np.sort(rows, axis=1)


def _trade(rows: Int64Array, costs: Int64Array) -> bool:
    """Trade a sample of the fullest row for a cheaper one of another, if it helps.

    Every trade lowers the sum of the squared sums of rows, so that there is a last one.
    """
    held = costs[rows]
    sums = held.sum(axis=1)
    full = int(np.argmax(sums))
    if sums[full] - sums.min() <= sums[full] // CLOSE_ENOUGH:
        return False
    moved = held[full][:, None, None] - held  # [of the fullest row, row, of that row]
    larger = np.maximum(sums[full] - moved, sums[:, None] + moved)
    larger[moved <= 0] = sums[full]
    mine, row, other = np.unravel_index(int(np.argmin(larger)), larger.shape)
    if larger[mine, row, other] >= sums[full]:
        return False
    rows[full, mine], rows[row, other] = rows[row, other], rows[full, mine]
    return True


def _in_pipeline_order(dealt: Int64Array, costs: Int64Array, lockstep: bool) -> Int64Array:
    """Each replica orders its own microbatches; with `lockstep` all of them alike."""
    sums = costs[dealt].sum(axis=2)
    if lockstep:
        return dealt[:, _cheapest_at_ends(sums.sum(axis=0))]
    return np.stack([row[_cheapest_at_ends(sum_)] for row, sum_ in zip(dealt, sums, strict=True)])


def _cheapest_at_ends(costs: Int64Array) -> Int64Array:
    """int64 [n]: indices into `costs`, rising and then falling.

    A pipeline waits for its first microbatch to reach the last stage and for its last one to come
    back. In the middle, neighbours of similar cost do not wait for each other.
    """
    by_cost = np.argsort(costs, kind="stable")
    return np.concatenate([by_cost[::2], by_cost[1::2][::-1]])
