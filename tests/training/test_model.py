"""Megatron's configurations of a run say what its recipe says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron_magi.training.run import model


def run(**sections: Any) -> RunConfig:
    return RunConfig(data=DataConfig("x"), **sections)


def test_the_model_has_the_recipes_shape() -> None:
    shape = ModelConfig(
        num_layers=6,
        hidden_size=96,
        ffn_hidden_size=200,
        num_attention_heads=8,
        num_query_groups=4,
        head_dim=16,
        norm_epsilon=1e-3,
        init_std=0.5,
        fused="off",
    )
    made = model.transformer_config(run(model=shape))
    assert (made.num_layers, made.hidden_size, made.ffn_hidden_size) == (6, 96, 200)
    assert (made.num_attention_heads, made.num_query_groups, made.kv_channels) == (8, 4, 16)
    assert (made.layernorm_epsilon, made.init_method_std) == (1e-3, 0.5)
    assert made.normalization == "RMSNorm" and made.gated_linear_unit and not made.add_bias_linear
    assert made.calculate_per_token_loss, "ranks count unequal numbers of tokens"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_and_what_stages_send_have_the_runs_dtype(dtype: Literal["fp32", "bf16"]) -> None:
    made = model.transformer_config(run(train=TrainConfig(dtype=dtype)))
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert (made.params_dtype, made.pipeline_dtype, made.bf16) == (wanted, wanted, dtype == "bf16")


@pytest.mark.parametrize(
    ("recompute", "granularity"), [("none", None), ("attention", "selective"), ("full", "full")]
)
def test_recomputation_is_megatrons(recompute: Any, granularity: str | None) -> None:
    made = model.transformer_config(run(train=TrainConfig(recompute=recompute)))
    assert made.recompute_granularity == granularity


@pytest.mark.parametrize("vpp", [None, 2])
def test_sends_are_paired_only_without_virtual_stages(vpp: int | None) -> None:
    made = model.transformer_config(run(parallel=ParallelConfig(pp=2, vpp=vpp)))
    assert made.virtual_pipeline_model_parallel_size == vpp
    assert (made.overlap_p2p_comm, made.batch_p2p_comm) == (vpp is not None, vpp is None)


def test_gradients_are_reduced_in_fp32_and_as_the_layout_says() -> None:
    plain = model.ddp_config(run())
    assert plain.grad_reduce_in_fp32 and not plain.use_distributed_optimizer
    flags = {"distributed_optimizer": True, "overlap_grad_reduce": True}
    made = model.ddp_config(run(parallel=ParallelConfig(**flags, overlap_param_gather=True)))
    assert made.use_distributed_optimizer and made.overlap_grad_reduce and made.overlap_param_gather


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize(("pp", "overlaps"), [(1, True), (2, False), (2, True)])
def test_stages_start_their_collectives_where_they_overlap(
    num_chunks: int, pp: int, overlaps: bool
) -> None:
    flags = {"overlap_grad_reduce": overlaps, "overlap_param_gather": overlaps}
    layout = ParallelConfig(pp=pp, distributed_optimizer=True, **flags)
    names = ("no_sync", "start_grad_sync", "start_param_sync")
    chunks = [SimpleNamespace(**{n: f"{n} of {i}" for n in names}) for i in range(num_chunks)]
    made = SimpleNamespace(grad_sync_func=None, param_sync_func=None)
    model._connect_schedule(run(parallel=layout), made, chunks)

    def of_chunks(name: str) -> Any:
        found = [getattr(chunk, name) for chunk in chunks]
        return found[0] if num_chunks == 1 else found

    assert made.no_sync_func == of_chunks("no_sync")
    assert callable(made.finalize_model_grads_func)
    starts = pp > 1 and overlaps
    assert made.grad_sync_func == (of_chunks("start_grad_sync") if starts else None)
    assert made.param_sync_func == (of_chunks("start_param_sync") if starts else None)
