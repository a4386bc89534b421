"""Dealing the steps of a rank's data loaders, and what the ranks compare of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_magi.balance import (
    CostShape,
    deal_step,
    document_lengths,
    fullest,
    order_of_megatron,
    sample_cost,
)
from megatron_magi.balance.deal import Int64Array

NUM_RECENT = 8
"""Steps that are remembered, for the loaders of the other model chunks of a rank."""


@dataclass(frozen=True)
class Rules:
    """How a loader's steps are dealt."""

    shape: CostShape
    pipelined: bool
    lockstep: bool

    def has_choice(self, rounds: Int64Array) -> bool:
        """True if a step has another dealing that may be faster; `rounds`: see `deal`."""
        microbatches, replicas, micro = rounds.shape
        between = replicas > 1 and microbatches * micro > 1
        return between or (self.pipelined and microbatches > 1)


@dataclass(frozen=True)
class FirstStep:
    """Facts of a loader's first step that must be equal on all ranks; numbers and names."""

    dataset: str
    samples: int
    microbatches: int
    costs: str
    dealing: str
    line: str = field(default="", compare=False)
    """Says what was dealt."""


@dataclass
class StepBalance:
    """The dealt steps of a rank in one run."""

    first_steps: dict[str, FirstStep] = field(default_factory=dict)
    """By the split of a data set; a rank without data has none."""
    compared: set[bool] = field(default_factory=set)
    """Kinds of schedules whose first step was compared: True for training, False for others."""
    _recent: dict[tuple[str, bytes], Int64Array] = field(default_factory=dict, repr=False)

    def deal(self, dataset: Any, split: str, rounds: Int64Array, rules: Rules) -> Int64Array:
        """Deal the samples of a step.

        Args:
            rounds: int64 [microbatches, replicas, micro], numbers of samples as Megatron has them.

        Returns:
            int64 [replicas, microbatches, micro].
        """
        key = dataset.unique_description_hash, rounds.tobytes()
        dealt = self._recent.pop(key, None)
        if dealt is None:
            dealt = self._dealt(dataset, split, rounds, rules)
        self._recent[key] = dealt
        if len(self._recent) > NUM_RECENT:
            del self._recent[next(iter(self._recent))]
        return dealt

    def _dealt(self, dataset: Any, split: str, rounds: Int64Array, rules: Rules) -> Int64Array:
        _, replicas, micro = rounds.shape
        numbers = rounds.reshape(-1)
        places = order_of_megatron(len(numbers), replicas, micro)
        line = (
            "nothing to deal in the first step, which has one sample a replica, or one replica "
            "without pipeline stages; a larger --global-batch-size gives a choice"
        )
        if rules.has_choice(rounds):
            costs = costs_of(dataset, numbers, rules.shape)
            places = deal_step(
                costs, replicas, micro, pipelined=rules.pipelined, lockstep=rules.lockstep
            )
            line = _line(costs, places, rules)
        if split not in self.first_steps:
            self.first_steps[split] = _first_step(dataset, rules, numbers[places], line)
        return numbers[places]


def costs_of(dataset: Any, numbers: Int64Array, shape: CostShape) -> Int64Array:
    """int64 [samples]: the cost of each sample."""
    lengths = (document_lengths(dataset, number) for number in numbers.tolist())
    return np.array([sample_cost(each, shape) for each in lengths], np.int64)


def _line(costs: Int64Array, places: Int64Array, rules: Rules) -> str:
    replicas, _, micro = places.shape
    if replicas == 1:
        return f"{len(costs)} samples a step, the cheapest microbatches first and last"
    order = order_of_megatron(len(costs), replicas, micro)
    mean = max(1, int(costs.sum())) / replicas
    before, after = (fullest(costs, each, rules.lockstep) / mean for each in (order, places))
    kind = "fullest replicas of microbatches" if rules.lockstep else "fullest replica"
    staged = ", the cheapest microbatches first and last" if rules.pipelined else ""
    return (
        f"{len(costs)} samples a step over {replicas} replicas, {kind} {before:.2f} -> "
        f"{after:.2f} of the mean (first step){staged}"
    )


def _first_step(dataset: Any, rules: Rules, dealt: Int64Array, line: str) -> FirstStep:
    return FirstStep(
        dataset=dataset.unique_description_hash,
        samples=len(dataset),
        microbatches=dealt.shape[1],
        costs=repr(rules),
        dealing=hashlib.blake2b(repr(dealt.tolist()).encode(), digest_size=8).hexdigest(),
        line=line,
    )
