"""Parameters counted by hand, in all and on the ranks of every layout."""

from __future__ import annotations

import pytest

from megatron_magi.training.estimate.flops import model_parameters, rank_parameters
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import DataConfig, ModelConfig, ParallelConfig


def config(tied: bool = True, tp: int = 1, pp: int = 1) -> RunConfig:
    model = ModelConfig(
        num_layers=4,
        hidden_size=8,
        ffn_hidden_size=20,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=3,
        vocab_size=30,
        vocab_multiple=16,
        tie_embeddings=tied,
    )
    data = DataConfig(path="x", eod_token=0)
    return RunConfig(model=model, data=data, parallel=ParallelConfig(tp=tp, pp=pp))


@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_and_norm_is_counted_once(tied: bool) -> None:
    query, key, value, out = 8 * 12, 8 * 6, 8 * 6, 12 * 8
    assert model_parameters(config(tied)) == {
        "embedding": 32 * 8,  # padded
        "attention": 4 * (query + key + value + out),
        "mlp": 4 * 3 * 8 * 20,
        "norms": 4 * 2 * 8 + 8,
        "output": 0 if tied else 32 * 8,
    }


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_stages_hold_the_model_and_a_tied_embedding_twice(pp: int, tied: bool) -> None:
    run = config(tied, pp=pp)
    stages = [rank_parameters(run, stage) for stage in range(pp)]
    whole = model_parameters(run)
    if tied and pp > 1:
        whole["output"] = whole["embedding"]  # the last stage's copy
    assert {part: sum(stage[part] for stage in stages) for part in whole} == whole
    assert [stage["embedding"] > 0 for stage in stages] == [i == 0 for i in range(pp)]
    if pp > 1:
        assert [stage["output"] > 0 for stage in stages] == [i == pp - 1 for i in range(pp)]


def test_tensor_parallel_ranks_share_matrices_and_repeat_norms() -> None:
    one, half = rank_parameters(config(False), 0), rank_parameters(config(False, tp=2), 0)
    assert half.pop("norms") == one.pop("norms")
    assert {part: 2 * number for part, number in half.items()} == one
