"""Bytes of a rank by part, against records of GPUs and by hand; test_dry_run.py has real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_magi.config import MagiConfig
from megatron_magi.core.mask.builders import from_cu_seqlens
from megatron_magi.core.plan import HeadShape, make_attn_plan
from megatron_magi.training.estimate.dry_run import dry_run
from megatron_magi.training.estimate.memory import (
    MASKS_KEPT,
    Fused,
    activation_bytes,
    chunks_in_flight,
    head_bytes,
    kept_key_bytes,
    layer_bytes,
    rank_memory,
    receive_bytes,
    shared_bytes,
)
from megatron_magi.training.recipe.recipe import load_recipe
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import DataConfig, ParallelConfig, TrainConfig

ROOT = Path(__file__).parents[2]


H200_GIB = {
    "fused": ([], 32.60),
    "fused_tp2": (["parallel.tp=2", "parallel.sequence_parallel=true"], 16.40),
    "fused_cp2_16k": (
        [
            *("parallel.cp=2", "data.seq_length=16384"),
            *("parallel.distributed_optimizer=true", "parallel.overlap_grad_reduce=true"),
        ],
        25.70,
    ),
}
"""Overrides of llama3_1b_1gpu, and the peak of the allocator on an H200."""


@pytest.mark.parametrize("name", H200_GIB)
def test_the_fused_parts_keep_what_was_measured_on_a_gpu(name: str) -> None:
    overrides, gib = H200_GIB[name]
    config = load_recipe("llama3_1b_1gpu", ["data.path=nowhere", *overrides])
    (memory,) = dry_run(config).memory
    assert memory.total / 2**30 == pytest.approx(gib, rel=0.15)
    step = memory.total - memory.weights - memory.gradients - memory.optimizer
    constant = (memory.total - step) / 2**30
    assert step / 2**30 == pytest.approx(gib - constant, rel=0.15), "beside weights and Adam"


RECORDS = sorted((ROOT / "benchmarks" / "records").glob("memory_h200_2026-11-21*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
def test_without_the_fused_parts_the_estimate_is_still_that_of_the_record(path: Path) -> None:
    for row in json.loads(path.read_text())["rows"]:
        where = ["data.path=nowhere", f"data.seq_length={row['seq_length']}", "model.fused=off"]
        base = ["parallel.cp=1", "train.global_batch_size=2", *row["overrides"]]
        config = load_recipe("llama3_1b_4gpu_cp4", [*base, *where])
        memory = dry_run(config, row["ranks"]).memory[0]
        # Since then our attention does not keep the QKV projection for the values in it.
        assert memory.total == pytest.approx(row["estimate"]["total"], rel=0.03)
        assert memory.total == pytest.approx(row["measured"]["peak"], rel=0.15)


def test_what_each_fused_part_keeps_less() -> None:
    """Llama-3.2-1B, 8,192 tokens: numbers of the shapes alone."""
    on = load_recipe("llama3_1b_1gpu", ["data.path=nowhere"])
    off = load_recipe("llama3_1b_1gpu", ["data.path=nowhere", "model.fused=off"])
    tokens, words = 8192, 128256
    swiglu, rotated, angles = 2 * 8192, (32 + 8) * 64, 4 * 64
    saved = layer_bytes(off, tokens) - layer_bytes(on, tokens)
    assert saved == 2 * tokens * (swiglu + angles)
    assert (shared_bytes(off, tokens), shared_bytes(on, tokens)) == (0, 4 * tokens * 64)
    assert head_bytes(off, tokens) - head_bytes(on, tokens) == 2 * tokens * words
    assert layer_bytes(on, tokens, Fused(parts=False)) == layer_bytes(off, tokens)
    plain = load_recipe("llama3_1b_1gpu", ["data.path=nowhere", "attention=flex_plain"])
    assert layer_bytes(plain, tokens) == layer_bytes(on, tokens)
    plain_off = load_recipe("llama3_1b_1gpu", ["data.path=nowhere", "attention=flex_plain",
                                               "model.fused=off"])  # fmt: skip
    assert layer_bytes(plain_off, tokens) - layer_bytes(off, tokens) == 2 * tokens * rotated


def test_sdpa_keeps_a_mask_only_where_there_are_documents() -> None:
    kinds = ["document", "causal"]
    recipes = [["data.path=nowhere", "attention=sdpa", f"data.mask={k}"] for k in kinds]
    documents, causal = (load_recipe("llama3_1b_1gpu", r) for r in recipes)
    tokens, layers = 8192, 16
    more = activation_bytes(documents, tokens, 1, 0) - activation_bytes(causal, tokens, 1, 0)
    assert more == tokens * tokens * (2 * layers + MASKS_KEPT)


@pytest.mark.parametrize(
    ("pp", "vpp", "batch", "expected"),
    [
        (1, None, 8, [1]),
        (4, None, 8, [4, 3, 2, 1]),
        (4, None, 2, [2, 2, 2, 1]),
        (2, 2, 8, [5, 3]),
        (2, 2, 2, [4, 3]),
    ],
)
def test_microbatches_in_flight(pp: int, vpp: int | None, batch: int, expected: list[int]) -> None:
    config = RunConfig(
        data=DataConfig("x"),
        train=TrainConfig(global_batch_size=batch),
        parallel=ParallelConfig(pp=pp, vpp=vpp),
    )
    assert [chunks_in_flight(config, 1, stage) for stage in range(pp)] == expected


def test_memory_counts_the_widths_of_the_plan() -> None:
    config = RunConfig(data=DataConfig("x", seq_length=128), parallel=ParallelConfig(cp=4))
    widths = (64, None), (96, 64), (96, None)
    shapes = [HeadShape(4, 4, keys, 4, head_dim_v=values) for keys, values in widths]
    mask = from_cu_seqlens([0, 50, 128])
    plans = [make_attn_plan(mask, 4, shape, config.magi) for shape in shapes]
    a, b, c = (receive_bytes(config, plan) for plan in plans)
    assert 2 * b == a + c > 0
    a, b, c = (rank_memory(config, plan, 1, 0).attention_workspace for plan in plans)
    tokens = plans[0].layout.num_local_tokens
    assert (a, b, c) == tuple(4 * tokens * 4 * width for width in (3 * 64, 2 * 96 + 64, 3 * 96))


def test_kept_keys_are_those_of_every_layer_that_waits_for_its_backward() -> None:
    def config_of(keeps: bool, **train: Any) -> RunConfig:
        return RunConfig(
            data=DataConfig("x", seq_length=128),
            parallel=ParallelConfig(cp=4),
            train=TrainConfig(**train),
            magi=MagiConfig(keep_received_keys=keeps, forward_mode="at_once"),
        )

    config = config_of(True)
    shape, mask = HeadShape(4, 4, 64, 4), from_cu_seqlens([0, 50, 128])
    plan = make_attn_plan(mask, 4, shape, config.magi)
    (stage,) = max(
        (plan.rank_plan(r).forward_stages for r in range(4)), key=lambda s: s[0].num_keys
    )
    layer = stage.num_keys * 4 * 2 * 64 * (4 if config.train.dtype == "fp32" else 2)
    assert kept_key_bytes(config, plan, 1, 0) == config.model.num_layers * layer > 0
    assert kept_key_bytes(config_of(True, recompute="full"), plan, 1, 0) == layer
    assert kept_key_bytes(config_of(False), plan, 1, 0) == 0
    kept, plain = (rank_memory(config_of(k), plan, 1, 0).receive_buffers for k in (True, False))
    assert kept - plain == config.model.num_layers * layer


def test_a_baseline_has_the_whole_sample_and_receives_nothing() -> None:
    config = RunConfig(attention="dense", data=DataConfig("x", seq_length=100))
    memory = rank_memory(config, None, 1, 0)
    m = config.model
    width = (m.num_attention_heads + 2 * m.num_query_groups) * m.kv_channels
    assert memory.receive_buffers == 0 and memory.attention_workspace == 4 * 100 * width
    assert memory.activations == activation_bytes(config, 100, 1, 0)
    assert memory.total == sum(vars(memory).values()) > memory.activations


@pytest.mark.parametrize("recompute", ["none", "attention"])
def test_two_tensor_parallel_ranks_share_a_layer(recompute: Literal["none", "attention"]) -> None:
    def kept(layout: ParallelConfig) -> int:
        train = TrainConfig(recompute=recompute)
        return layer_bytes(RunConfig(data=DataConfig("x"), train=train, parallel=layout), 64)

    assert 2 * kept(ParallelConfig(tp=2, sequence_parallel=True)) == kept(ParallelConfig())
