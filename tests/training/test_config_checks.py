"""Values of a run that are wrong alone or do not fit together are one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magi.training.recipe.config_checks import data_parallel_size
from megatron_magi.training.recipe.recipe_error import RecipeError
from tests.training.small_recipes import MINIMAL, Bad, check_refused, load

SYMM_MEM = ("parallel.cp=4", "magi.transport=symm_mem", "train.dtype=bf16")
BAD = [
    Bad("zero", ("parallel.cp=0",), ("parallel.cp must be positive, got 0",)),
    Bad(
        "rows", ("data.seq_length=9223372036854775807",), ("data.seq_length must be at most 2,147",)
    ),
    Bad("seed", ("train.seed=18446744073709551616",), ("train.seed must be at least 0 and below",)),
    Bad("seed_sign", ("train.seed=-1",), ("train.seed must be at least 0 and below 2^63, got -1",)),
    Bad("heads", ("model.num_query_groups=3",), ("multiple of model.num_query_groups", "4 and 3")),
    Bad("hidden", ("model.hidden_size=130",), ("model.head_dim",)),
    Bad("eod", ("data.eod_token=300",), ("below model.vocab_size, got 300 and 257",)),
    Bad("tp", ("parallel.tp=4",), ("model.num_query_groups must be a multiple of parallel.tp 4",)),
    Bad("pp", ("parallel.pp=3",), ("multiple of pp * vpp = 3, got 4", "use 6 layers")),
    Bad("vpp", ("parallel.vpp=2",), ("parallel.vpp needs parallel.pp of 2 or more",)),
    Bad("ep", ("parallel.ep=2",), ("parallel.ep must be 1",)),
    Bad("sp", ("parallel.sequence_parallel=true",), ("needs parallel.tp of 2 or more",)),
    Bad("gather", ("parallel.overlap_param_gather=true",), ("distributed_optimizer",)),
    Bad("dense", ("attention=dense", "parallel.cp=2"), ("needs parallel.cp 1", "got cp 2")),
    Bad("sdpa", ("attention=sdpa", "parallel.cp=2"), ("sdpa needs parallel.cp 1", "got cp 2")),
    Bad("flex", ("attention=flex_plain", "parallel.cp=2"), ("flex_plain needs parallel.cp 1",)),
    Bad("sdpa_window", ("attention=sdpa", "data.window=9"), ("sdpa needs data.mask", "window 9")),
    Bad(
        "flex_blocks",
        ("attention=flex_plain", "data.mask=block_causal", "data.block_tokens=8"),
        ("flex_plain needs data.mask document or causal", "got block_causal", "attention=dense"),
    ),
    Bad("no_block", ("data.mask=block_causal",), ("tokens of a block", "set data.block_tokens")),
    Bad("block", ("data.block_tokens=8",), ("needs data.mask block_causal, got 8 with mask docu",)),
    Bad("balance", ("data.balance_steps=0",), ("data.balance_steps must be positive, got 0",)),
    Bad(
        "long_balance",
        ("data.balance_steps=101",),
        ("data.balance_steps must be at most train.iterations 100, got 101",),
    ),
    Bad(
        "many_balanced",
        ("data.balance_steps=33", "train.global_batch_size=8192"),
        ("must be at most 262,144 samples", "got 33 * 8,192; lower data.balance_steps"),
    ),
    Bad(
        "symm_mem_fp32",
        ("parallel.cp=2", "magi.transport=symm_mem", "train.dtype=fp32"),
        ("symm_mem needs train.dtype bf16", "got fp32 and auto; set magi.transport=auto"),
    ),
    Bad(
        "symm_mem_kernel",
        (*SYMM_MEM, "magi.kernel_backend=flex"),
        ("magi.kernel_backend auto or cuda, got bf16 and flex",),
    ),
    Bad(
        "symm_mem_nodes",
        (*SYMM_MEM, "magi.costs.ranks_per_node=2"),
        ("parallel.cp 4 ranks on one node, got magi.costs.ranks_per_node 2",),
    ),
    Bad("blocks", ("data.block_window=2",), ("data.block_window needs data.mask block_causal",)),
    Bad("empty_block", ("data.mask=block_causal", "data.block_tokens=0"), ("must be positive",)),
    Bad(
        "token_window",
        ("data.mask=block_causal", "data.block_tokens=8", "data.window=9"),
        ("got data.window 9 in tokens", "set data.block_window"),
    ),
    Bad(
        "warmup",
        ("optimizer.warmup_iters=100",),
        (
            "optimizer.warmup_iters must be at least 0 and below train.iterations 100, got 100; "
            "set optimizer.warmup_iters=10, or train.iterations above 100",
        ),
    ),
    Bad(
        "warmup_decay",
        ("optimizer.decay_iters=9", "optimizer.warmup_iters=50"),
        ("below optimizer.decay_iters 9, got 50; set optimizer.warmup_iters=0, or optim",),
    ),
    Bad("warmup_negative", ("optimizer.warmup_iters=-1",), ("got -1; set optimizer.warmup_it",)),
    Bad("min_lr", ("optimizer.min_lr=1",), ("optimizer.min_lr must lie between 0",)),
    Bad("held_out", ("validation.fraction=1",), ("at least 0 and below 1, got 1.0",)),
    Bad("nothing_held_out", ("validation.interval=5",), ("set validation.fraction=0.02",)),
    Bad("keep", ("checkpoint.keep=0",), ("checkpoint.keep must be positive, got 0",)),
    Bad("no_data", ("data.path=''",), ("data.path must name packed data", "megatron-magi data")),
    Bad("clip_sign", ("optimizer.clip_grad=-1",), ("clip_grad must be at least 0, got -1.0",)),
    Bad("decay", ("optimizer.weight_decay=-0.1",), ("weight_decay must be at least 0, got -0.1",)),
    Bad("beta", ("optimizer.beta2=1",), ("beta2 must be at least 0 and below 1, got 1.0",)),
    Bad("eps", ("optimizer.eps=0",), ("optimizer.eps must be positive, got 0.0; 1e-08 is usual",)),
    Bad("std", ("model.init_std=0",), ("model.init_std must be positive, got 0.0",)),
    Bad("prefetch", ("data.prefetch=-1",), ("data.prefetch must be at least 0, got -1",)),
    Bad("eod_sign", ("data.eod_token=-1",), ("data.eod_token must be at least 0, got -1",)),
    Bad("dump", ("train.dump_gradients=[0,3]",), ("count from 1, got [0, 3]",)),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda b: b.name)
def test_a_value_that_does_not_fit_is_one_clear_error(tmp_path: Path, bad: Bad) -> None:
    check_refused(tmp_path, bad)


def test_values_on_their_bounds_are_fine(tmp_path: Path) -> None:
    zeros = ("beta1", "beta2", "min_lr", "weight_decay", "clip_grad", "warmup_iters")
    config = load(tmp_path, MINIMAL, *(f"optimizer.{name}=0" for name in zeros), "data.prefetch=0")
    assert all(getattr(config.optimizer, name) == 0 for name in zeros)
    high = ("optimizer.lr=1e-3", "optimizer.min_lr=1e-3", "optimizer.warmup_iters=99")
    assert load(tmp_path, MINIMAL, *high, "data.eod_token=256").optimizer.min_lr == 1e-3
    longer = load(tmp_path, MINIMAL, "optimizer.warmup_iters=150", "optimizer.decay_iters=151")
    assert longer.train.iterations == 100
    assert load(tmp_path, MINIMAL, "data.balance_steps=100").data.balance_steps == 100
    assert load(tmp_path, MINIMAL, *SYMM_MEM).magi.transport == "symm_mem"
    assert load(tmp_path, MINIMAL, *SYMM_MEM, "magi.costs.ranks_per_node=4").parallel.cp == 4
    assert load(tmp_path, MINIMAL, "magi.transport=symm_mem").train.dtype == "fp32"


def test_the_world_must_fit_the_layout(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "parallel.cp=2", "parallel.pp=2")
    assert data_parallel_size(config, 8) == 2
    with pytest.raises(RecipeError, match=r"a multiple of tp 1 \* pp 2 \* cp 2 = 4, got 6"):
        data_parallel_size(config, 6)
    fixed = load(tmp_path, MINIMAL, "parallel.cp=2", "parallel.dp=2")
    with pytest.raises(RecipeError, match=r"dp 2 = 4, got 2"):
        data_parallel_size(fixed, 2)


def test_the_batch_must_divide_over_replicas_and_stages(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "train.global_batch_size=6")
    with pytest.raises(RecipeError, match=r"data-parallel size 4, got 6; use 8"):
        data_parallel_size(config, 4)
    interleaved = load(
        tmp_path, MINIMAL, "parallel.pp=2", "parallel.vpp=2", "train.global_batch_size=3"
    )
    with pytest.raises(RecipeError, match=r"multiple of parallel.pp 2, got 3"):
        data_parallel_size(interleaved, 2)
