"""What a rank's loaders deal and say, without other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import megatron_magi.launcher  # noqa: F401  prepares megatron before it is imported
from megatron_magi.balance import CostShape
from megatron_magi.config import MagiConfig
from megatron_magi.launcher import step_balance
from megatron_magi.launcher.balance_agreement import difference
from megatron_magi.launcher.balanced_loader import wrap_data_loader
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.job_costs import cost_shape, replicas_meet
from megatron_magi.launcher.step_balance import NUM_RECENT, Rules, StepBalance
from tests.launcher.few_arguments import arguments
from tests.launcher.one_rank import launch_of

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


def loaded(sampler: Any, **options: Any) -> Any:
    launch = launch_of(8)
    launch.options = LauncherOptions(MagiConfig(), **options)
    loader = None if sampler is None else SimpleNamespace(batch_sampler=sampler)
    return wrap_data_loader(lambda dataset, consumed_samples: loader, launch)(Data(), 0)


def test_loaders_without_steps_stay() -> None:
    whole = type("MegatronFullValidationSampler", (), {})()
    assert loaded(whole, balance_step=True).batch_sampler is whole
    assert loaded(None, balance_step=True) is None
    with pytest.raises(TypeError, match="--magi-balance-step requires Megatron's batch samplers, "):
        loaded(object(), balance_step=True)
    original = object()
    assert wrap_data_loader(original, launch_of(8)) is original, "no hook without the flag"


def test_the_first_rank_that_differs_is_named() -> None:
    same = {"dataset": "a", "dealing": "b"}
    said = difference([{}, same, same, {"dataset": "a", "dealing": "c"}])
    assert "alike, got dealing c on rank 3 and b on rank 1, which would" in said
    assert "leave --magi-balance-step out" in said and "\n" not in said


MODEL = {"num_layers": 6, "ffn_hidden_size": 128, "group_query_attention": False, "swiglu": True}


def test_layers_of_a_job() -> None:
    plain = cost_shape(arguments(**MODEL))
    assert (plain.full_layers, plain.window_layers, plain.tile_cost) == (6, 0, 7 * 16)
    for skipped, counts in ((None, (0, 6)), (3, (2, 4)), ([1, 0, 0, 0, 0, 1], (4, 2))):
        given = {"window_size": (17, 0), "window_attn_skip_freq": skipped}
        found = cost_shape(arguments(**MODEL, **given))
        assert (found.full_layers, found.window_layers, found.window) == (*counts, 17)
    assert cost_shape(arguments(**MODEL, window_size=(-1, 0))) == plain
    large = {**MODEL, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336}
    assert cost_shape(arguments(**large)).token_cost == 6 * 3 * (
        4 * 4096**2 + 3 * 4096 * 14336
    ) // (128 * 128 * 32)
    assert cost_shape(arguments(**MODEL, num_attention_heads=None)) == CostShape(1, 0, 1)


@pytest.mark.parametrize(
    ("given", "meet"),
    [
        ({}, False),
        ({"num_experts": 8, "expert_model_parallel_size": 2}, False),
        ({"num_experts": 8, "expert_model_parallel_size": 4}, True),
        ({"num_experts": 8, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, 1),
        ({"use_torch_fsdp2": True}, True),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"}, False),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
            True,
        ),
    ],
)
def test_replicas_meet_where_layers_are_spread_over_them(given: dict[str, Any], meet: bool) -> None:
    """At context parallelism 2: experts of two ranks lie inside a replica."""
    assert replicas_meet(arguments(**given)) == bool(meet)
