"""Heads and tokens of a job's ranks, and sizes that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_magi.config import MagiConfig
from megatron_magi.launcher.constraints import refusals
from megatron_magi.launcher.job_sizes import heads_of
from tests.launcher.few_arguments import arguments


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_heads_that_no_key_head_serves_are_refused(kernel: Any) -> None:
    given = arguments(num_attention_heads=4, group_query_attention=True, num_query_groups=3)
    (line,) = refusals(given, MagiConfig(kernel_backend=kernel))
    assert "num_heads_q must be a multiple of num_heads_kv, got 4 and 3" in line
    assert line.endswith(
        "(--num-attention-heads, --num-query-groups, --tensor-model-parallel-size)"
    )


LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "num_query_groups": 1,
}


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (LATENT, (4, 192, 128)),
        ({**LATENT, "hybrid_layer_pattern": "+-"}, (4, 192, 128)),
        ({**LATENT, "hybrid_layer_pattern": "*-"}, (1, 16, 16)),
        ({**LATENT, "multi_latent_attention": False}, (1, 16, 16)),
    ],
)
def test_heads_are_those_that_the_model_will_have(
    given: dict[str, Any], shape: tuple[int, ...]
) -> None:
    heads = heads_of(arguments(**given))
    assert (heads.num_heads_kv, heads.head_dim, heads.value_dim) == shape


def test_heads_that_a_checkpoint_brings_refuse_nothing() -> None:
    assert not refusals(arguments(num_attention_heads=None, hidden_size=None))


@pytest.mark.parametrize(("chunk", "accepted"), [(96, True), (191, True), (192, False)])
def test_every_rank_gets_a_chunk(chunk: int, accepted: bool) -> None:
    magi = MagiConfig(chunk_size=chunk)
    for sizes in ({"micro_batch_size": 2}, {"micro_batch_size": 1, "eval_micro_batch_size": 2}):
        lines = refusals(arguments(**sizes, context_parallel_size=2), magi)  # 192 tokens
        found = [line for line in lines if "192 tokens" in line]
        assert bool(found) is not accepted
        assert all(line.endswith("use at most 191, or None (--magi-chunk-size)") for line in found)
    for unknown in ({"micro_batch_size": None}, {"seq_length": None, "encoder_seq_length": None}):
        assert not refusals(arguments(**unknown), magi)


def test_heads_are_shared_out_over_tensor_ranks() -> None:
    (line,) = refusals(arguments(num_attention_heads=4, tensor_model_parallel_size=3))
    assert line.endswith("got 4 and 3; change one of them")
    assert not refusals(arguments(num_attention_heads=6, tensor_model_parallel_size=3))
    grouped = {"num_attention_heads": 12, "group_query_attention": True}
    for groups, ranks, accepted in ((4, 2, 1), (2, 4, 1), (4, 3, 0), (3, 2, 0)):
        given = arguments(**grouped, num_query_groups=groups, tensor_model_parallel_size=ranks)
        assert (not refusals(given)) == bool(accepted), (groups, ranks)
