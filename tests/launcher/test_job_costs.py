"""What a job's layers cost, and where replicas wait for each other."""

from __future__ import annotations

from typing import Any

import pytest

import megatron_magi.launcher  # noqa: F401  prepares megatron before it is imported
from megatron_magi.balance import CostShape
from megatron_magi.launcher.job_costs import cost_shape, replicas_meet
from tests.launcher.few_arguments import arguments

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
