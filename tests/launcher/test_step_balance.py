"""What a rank's loaders deal and say, without other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import megatron_magi.launcher  # noqa: F401  prepares megatron before it is imported
from megatron_magi.balance import CostShape
from megatron_magi.launcher import step_balance
from megatron_magi.launcher.step_balance import NUM_RECENT, Rules, StepBalance

PLAIN = Rules(CostShape(1, 0, 1), pipelined=False, lockstep=False)


class Data(list[int]):
    """Costs of samples."""

    unique_description_hash = "some data"


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Costs come from `Data`; the numbers that they were asked for."""
    calls: list[list[int]] = []

    def costs_of(dataset: Any, numbers: Any, shape: Any) -> Any:
        calls.append(numbers.tolist())
        return np.array([dataset[n] for n in numbers], np.int64)

    monkeypatch.setattr(step_balance, "costs_of", costs_of)
    return calls


def rounds(*shape: int, first: int = 0) -> Any:
    return np.arange(first, first + np.prod(shape), dtype=np.int64).reshape(shape)


def test_chunks_of_a_rank_pay_once(asked: list[list[int]]) -> None:
    balance, data = StepBalance(), Data(range(400))
    first = balance.deal(data, "train", rounds(4, 2, 1), PLAIN)
    assert balance.deal(Data(data), "train", rounds(4, 2, 1), PLAIN) is first
    assert len(asked) == 1 and first.shape == (2, 4, 1)
    for step in range(1, NUM_RECENT + 1):
        balance.deal(data, "train", rounds(4, 2, 1, first=8 * step), PLAIN)
    balance.deal(data, "train", rounds(4, 2, 1), PLAIN)
    assert len(asked) == NUM_RECENT + 2, "the oldest was forgotten"


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (PLAIN, "4 samples a step over 2 replicas, fullest replica 1.80 -> 1.00 of the mean"),
        (
            Rules(PLAIN.shape, False, True),
            "fullest replicas of microbatches 1.80 -> 1.00 of the mean (first step)",
        ),
        (Rules(PLAIN.shape, True, False), "cheapest microbatches first and last"),
    ],
)
def test_the_line_of_the_first_step(rules: Rules, said: str) -> None:
    balance = StepBalance()
    balance.deal(Data([9, 1, 9, 1]), "train", rounds(2, 2, 1), rules)
    assert said in balance.first_steps["train"].line
    kept = balance.first_steps["train"]
    balance.deal(Data([1, 1, 9, 1, 1, 1, 1, 1]), "train", rounds(2, 2, 1, first=4), rules)
    assert balance.first_steps == {"train": kept}


@pytest.mark.parametrize(
    ("shape", "pipelined", "has_choice"),
    [
        ((1, 2, 1), True, False),
        ((4, 1, 2), False, False),
        ((4, 1, 1), True, True),
        ((1, 2, 2), False, True),
        ((2, 2, 1), False, True),
    ],
)
def test_without_a_choice_no_cost_is_asked_for(
    shape: tuple[int, int, int], pipelined: bool, has_choice: bool, asked: list[list[int]]
) -> None:
    balance, step = StepBalance(), rounds(*shape)
    dealt = balance.deal(Data(range(8)), "train", step, Rules(PLAIN.shape, pipelined, False))
    assert bool(asked) == has_choice
    line = balance.first_steps["train"].line
    assert line.startswith("nothing to deal in the first step") != has_choice
    assert has_choice or (dealt == step.swapaxes(0, 1)).all()
