"""Which samples share a step, which replica takes each of them, and in which order it runs them.

Samples have equal tokens and unequal attention, and all replicas wait for the slowest one. So a
run's samples are taken in groups of a few steps, in the sampler's order, and change places inside
their group alone. The order is a function of the costs: it draws no random number, communicates
nothing, and adds up integers only, so that every rank finds the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron_magi.balance.deal import Int64Array, deal_rows


@dataclass(frozen=True)
class StepShape:
    """How a group's samples are spread over steps, microbatches and replicas."""

    num_steps: int
    """Steps of a group."""
    num_microbatches: int
    """Samples that a replica takes in a step."""
    dp_size: int
    """Number of replicas."""
    is_pipelined: bool
    """Whether microbatches of a replica wait for each other in a pipeline."""

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.num_microbatches * self.dp_size


@dataclass(eq=False)
class StepOrder:
    """The sample at every place of a run; places count as in the sampler's order.

    Place n belongs to microbatch n % batch // dp_size of replica n % dp_size. Groups lie end to end
    from `first` on.
    """

    cost_of: Callable[[int], int]
    """Cost of a sample, in any unit, by its number."""
    shape: StepShape
    first: int = 0
    """First place of all groups. Not 0 for a run that goes on with another batch."""
    _group: tuple[int, Int64Array] | None = field(default=None, init=False, repr=False)

    def sample_at(self, place: int) -> int:
        """Number of the sample at a place, `first` or later.

        The first call in a group finds the costs of all its samples, and the next ones reuse them.
        """
        size = self.shape.num_steps * self.shape.batch
        start = place - (place - self.first) % size
        if self._group is None or self._group[0] != start:
            numbers = range(start, start + size)
            costs = np.array([self.cost_of(number) for number in numbers], dtype=np.int64)
            self._group = start, plan_steps(costs, self.shape).ravel()
        return start + int(self._group[1][place - start])


def plan_steps(costs: Int64Array, shape: StepShape) -> Int64Array:
    """Spread the samples of a group over its steps.

    Samples of similar cost share a step, whatever the number of replicas: a run that continues in
    another layout has the same steps.

    Args:
        costs: int64 [num_steps * batch], 0 or more, in the sampler's order. Their sum must be an
            int64.

    Returns:
        int64 [num_steps, num_microbatches, dp_size], indices into `costs`, each of them once.
    """
    planned = []
    for step in share_steps(costs, shape.num_steps):
        replicas = step[deal_rows(costs[step], shape.dp_size)]
        if shape.is_pipelined:
            replicas = np.stack([row[pipeline_order(costs[row])] for row in replicas])
        planned.append(replicas.T)
    return np.stack(planned)


def share_steps(costs: Int64Array, num_steps: int) -> Int64Array:
    """int64 [num_steps, batch]: indices into `costs`, neighbours in cost together.

    The sum over steps of the largest cost of a step is the least possible. Steps are in the order
    of the mean place of their samples, and the samples of a step in that of their places.
    """
    by_cost = np.argsort(-costs, kind="stable")
    steps = np.sort(by_cost.reshape(num_steps, -1), axis=1)
    return steps[np.argsort(steps.sum(axis=1), kind="stable")]


def pipeline_order(costs: Int64Array) -> Int64Array:
    """int64 [n]: indices into `costs`, the cheap ones at both ends, the costliest in the middle.

    A pipeline waits for its first microbatch to reach the last pipeline stage and for its last one
    to come back: these two should be short. In the middle, neighbours of similar cost do not wait
    for each other.
    """
    by_cost = np.argsort(costs, kind="stable")
    return np.concatenate([by_cost[::2], by_cost[1::2][::-1]])
