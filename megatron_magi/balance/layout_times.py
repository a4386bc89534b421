"""Time of a training step under each way to divide GPUs, from document lengths alone.

    prices = Prices(costs, tokens, machine)             # of every sample of some steps
    times = [price(division, prices) for division in divisions(machine, 8)]

Replicas wait for the slowest. A step takes the mean over steps of its slowest replica, plus the
part of the exchange that computation does not hide. Optimizer, gradient exchange and tensor
parallelism's own messages are left out: they are equal for all divisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_magi.balance.deal import deal_step, order_of_megatron

Seconds = npt.NDArray[np.float64]

RECOMPUTED = 4 / 3
"""Time of a step whose forward runs again in the backward."""
CP_IMBALANCE = 1.005
"""Of a plan: its fullest rank over the mean, at most 1.01 (records/planner_cpu_2026-11-26.json)."""
EXPOSED = 0.5
"""Part of the exchange that is not hidden under computation."""
CLOSE = 1.02
"""Divisions this much slower than the fastest one are as good."""
NOTHING_TO_GAIN = 1.03
"""If plain data parallelism is this close to the ideal, no other division is worth its effort."""


@dataclass(frozen=True)
class Machine:
    """The GPUs of a job and what a rank of a model replica shares."""

    gpus: int
    gpus_per_node: int
    model_gpus: int
    """Tensor x pipeline parallel size: GPUs that share one rank's tokens."""
    stages: int = 1
    """Pipeline parallel size."""
    lockstep: bool = False
    """True if replicas meet in every layer (experts or weights spread over replicas)."""
    max_tokens: float = float("inf")
    """Tokens of one microbatch on a context-parallel rank for which activations fit; above it they
    are recomputed."""

    @property
    def ranks(self) -> int:
        """Ranks to divide into replicas and context-parallel ranks."""
        return self.gpus // self.model_gpus


@dataclass(frozen=True)
class Division:
    """A way to divide the ranks of a job."""

    replicas: int
    """Data-parallel size."""
    cp_size: int
    joined: int
    """Samples of a microbatch, joined to one stream."""
    dealt: bool
    """True if `--magi-balance-step` deals the samples of a step by their cost."""

    @property
    def name(self) -> str:
        """As one would say it: DP 8 x CP 8, 8 joined, dealt."""
        parts = [f"DP {self.replicas}" + (f" x CP {self.cp_size}" if self.cp_size > 1 else "")]
        parts += [f"{self.joined} joined"] if self.joined > 1 else []
        return ", ".join([*parts, *(["dealt"] if self.dealt else [])])


@dataclass(frozen=True)
class Prices:
    """Costs of the samples of some steps."""

    costs: Seconds
    """float64 [steps, samples]: seconds that a sample takes on one GPU, forward and backward."""
    tokens: int
    """Tokens of a sample."""
    exchange: Callable[[int, int, int], float]
    """(context-parallel size, joined samples, tokens of the stream) -> seconds that the slowest
    rank's rows of one microbatch travel."""


@dataclass(frozen=True)
class LayoutTime:
    """Predicted times of a step, in seconds."""

    division: Division
    mean: float
    """Mean over steps of the slowest replica, with the exposed exchange."""
    worst: float
    """The slowest step."""
    ideal: float
    """If all GPUs had equal work and nothing were exchanged or recomputed."""
    waiting: float
    """Share of the mean step that replicas spend waiting for the slowest, or for a pipeline."""
    exchange: float
    """Seconds that rows travel in a step, hidden or not."""
    recomputed: bool

    @property
    def over_ideal(self) -> float:
        return self.mean / self.ideal


def divisions(machine: Machine, samples: int) -> Iterator[Division]:
    """Every division of the ranks whose context-parallel groups stay inside a host, with one
    sample a microbatch or as many as context-parallel ranks, in stock's order or dealt.

    Args:
        samples: of a step.
    """
    in_host = max(1, machine.gpus_per_node // machine.model_gpus)
    for cp_size in range(1, in_host + 1):
        replicas, rest = divmod(machine.ranks, cp_size)
        if rest or in_host % cp_size:
            continue
        for joined in sorted({1, cp_size}):
            whole = samples % (replicas * joined) == 0
            has_choice = replicas > 1 and samples > replicas * joined
            for dealt in (False, True) if has_choice or joined > 1 < replicas else (False,):
                if whole:
                    yield Division(replicas, cp_size, joined, dealt)


def price(division: Division, prices: Prices, machine: Machine) -> LayoutTime:
    """Predict the step under one division.

    Raises:
        ValueError: the samples of a step do not fill whole microbatches of all replicas.
    """
    d = division
    stream = prices.tokens * d.joined
    recomputed = stream / d.cp_size > machine.max_tokens
    per_rank = d.cp_size * machine.model_gpus / (CP_IMBALANCE if d.cp_size > 1 else 1.0)
    scale = (RECOMPUTED if recomputed else 1.0) / per_rank
    held = np.stack([_microbatches(costs, d, machine) for costs in prices.costs]) * scale
    steps = _step_seconds(held, machine)
    one = prices.exchange(d.cp_size, d.joined, stream) if d.cp_size > 1 else 0.0
    exchange = one * held.shape[2]
    mean, exposed = float(steps.mean()), EXPOSED * exchange
    busy = float(held.sum(axis=2).mean())
    return LayoutTime(
        division=d,
        mean=mean + exposed,
        worst=float(steps.max()) + exposed,
        ideal=float(prices.costs.sum(axis=1).mean()) / machine.gpus,
        waiting=(mean - busy) / (mean + exposed),
        exchange=exchange,
        recomputed=recomputed,
    )


def recommended(times: Sequence[LayoutTime]) -> LayoutTime:
    """The best of the divisions: of those within 2 % of the fastest one, first without
    recomputation, then with the smallest groups, the shortest exchange, and in stock's order."""
    fastest = min(time.mean for time in times)
    close = [time for time in times if time.mean <= CLOSE * fastest]
    return min(
        close, key=lambda t: (t.recomputed, t.division.cp_size, t.exchange, t.division.dealt)
    )


def has_nothing_to_gain(times: Sequence[LayoutTime]) -> bool:
    """Returns True if data parallelism alone, in stock's order, is close to the ideal."""
    return any(
        t.division.cp_size == 1 and not t.division.dealt and t.over_ideal <= NOTHING_TO_GAIN
        for t in times
    )


def _microbatches(costs: Seconds, division: Division, machine: Machine) -> Seconds:
    """float64 [replicas, microbatches]: cost of every microbatch of a step."""
    d = division
    places = order_of_megatron(len(costs), d.replicas, d.joined)
    if d.dealt:
        whole = (costs * (2**40 / costs.sum())).astype(np.int64)
        places = deal_step(
            whole, d.replicas, d.joined, pipelined=machine.stages > 1, lockstep=machine.lockstep
        )
    found: Seconds = costs[places].sum(axis=2)
    return found


def _step_seconds(held: Seconds, machine: Machine) -> Seconds:
    """float64 [steps]: the slowest replica, of float64 [steps, replicas, microbatches]."""
    if machine.stages > 1:
        return pipeline_seconds(held, machine.stages).max(axis=1)
    if machine.lockstep:
        return held.max(axis=1).sum(axis=1)
    return held.sum(axis=2).max(axis=1)


def pipeline_seconds(held: Seconds, stages: int) -> Seconds:
    """float64 [...]: time of 1F1B without virtual stages, for float64 [..., microbatches].

    A microbatch takes its time on every stage, a third of it forward. Messages take none.
    """
    count = held.shape[-1]
    forward, backward = held / 3, held * 2 / 3
    free = [np.zeros(held.shape[:-1]) for _ in range(stages)]
    done: dict[tuple[str, int, int], Seconds] = {}
    orders = [_order_of_stage(stage, stages, count) for stage in range(stages)]
    places = [0] * stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage in range(stages):
            while places[stage] < len(orders[stage]):
                kind, i = orders[stage][places[stage]]
                before = _needed(kind, stage, stages, i)
                if before is not None and before not in done:
                    break
                ready = free[stage] if before is None else np.maximum(free[stage], done[before])
                free[stage] = ready + (forward if kind == "F" else backward)[..., i]
                done[kind, stage, i] = free[stage]
                places[stage] += 1
    return np.maximum.reduce(free)


def _order_of_stage(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    warm_up = min(count, stages - 1 - stage)
    order = [("F", i) for i in range(warm_up)]
    for i in range(count - warm_up):
        order += [("F", warm_up + i), ("B", i)]
    return [*order, *(("B", i) for i in range(count - warm_up, count))]


def _needed(kind: str, stage: int, stages: int, i: int) -> tuple[str, int, int] | None:
    """The operation that must end before. None means the first stage's forward."""
    if kind == "F":
        return None if stage == 0 else ("F", stage - 1, i)
    return ("F", stage, i) if stage == stages - 1 else ("B", stage + 1, i)
