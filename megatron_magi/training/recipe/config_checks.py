"""Checks the values of a run, each by itself and against the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from megatron_magi.checks import is_bool, is_integer_like, shown
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_values import RunValues

MAX_GROUP = 2**18
"""The most samples that may change places; their costs take about a minute."""

MOST = 2**31 - 1
"""The largest value of every count, because rows and tokens are numbered by 32 bits in places."""


def check_run(config: RunValues) -> None:
    """Make every check, types first.

    Raises:
        RecipeError: the first value that does not fit, what was required and what to do.
    """
    for check in (
        _check_kinds,
        _check_positive,
        _check_optimizer,
        _check_model,
        _check_parallel,
        _check_train,
        _check_mask,
        _check_balance,
        _check_transport,
        _check_validation,
    ):
        check(config)


def data_parallel_size(config: RunValues, world_size: int) -> int:
    """Replicas in a world of `world_size` processes; the batch must divide over them.

    Raises:
        RecipeError: if the world or the batch does not divide.
    """
    p = config.parallel
    layout = f"tp {p.tp} * pp {p.pp} * cp {p.cp}"
    dp, rest = divmod(world_size, p.model_size)
    if rest or (p.dp is not None and p.dp != dp):
        want = f"a multiple of {layout} = {p.model_size}"
        if p.dp is not None:
            want = f"{layout} * dp {p.dp} = {p.model_size * p.dp}"
        raise RecipeError(
            f"the number of processes must be {want}, got {world_size}; "
            f"start that many, or change parallel.*"
        )
    batch = config.train.global_batch_size
    _require(
        batch % dp == 0,
        f"train.global_batch_size must be a multiple of the data-parallel size {dp}, got {batch}; "
        f"use {_ceil_to(batch, dp)}",
    )
    microbatches = batch // dp
    _require(
        p.vpp is None or microbatches % p.pp == 0,
        f"with parallel.vpp the microbatches per step must be a multiple of parallel.pp {p.pp}, "
        f"got {microbatches}; use train.global_batch_size={_ceil_to(batch, dp * p.pp)}",
    )
    return dp


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RecipeError(message)


def _ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check_kinds(c: RunValues) -> None:
    for section in (f.name for f in fields(c) if is_dataclass(getattr(c, f.name))):
        for misfit in misfits(section, getattr(c, section)):
            raise RecipeError(misfit)


def _check_optimizer(c: RunValues) -> None:
    o = c.optimizer
    for name in ("beta1", "beta2"):
        _require(
            0 <= getattr(o, name) < 1,
            f"optimizer.{name} must be at least 0 and below 1, got {getattr(o, name)}; "
            f"0.9 is usual",
        )
    for name, value, usual in (
        ("optimizer.eps", o.eps, 1e-8),
        ("model.norm_epsilon", c.model.norm_epsilon, 1e-5),
        ("model.init_std", c.model.init_std, 0.02),
    ):
        _require(value > 0, f"{name} must be positive, got {value}; {usual} is usual")
    for name, value, remark in (
        ("optimizer.weight_decay", o.weight_decay, "0 is none"),
        ("optimizer.clip_grad", o.clip_grad, "0 is no cap"),
        ("data.prefetch", c.data.prefetch, "0 reads nothing ahead"),
        ("data.eod_token", c.data.eod_token, "it comes from the tokenizer"),
    ):
        _require(value >= 0, f"{name} must be at least 0, got {value}; {remark}")


def _check_positive(c: RunValues) -> None:
    sections = {
        "model": (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "head_dim",
            "vocab_size",
            "vocab_multiple",
            "rotary_base",
            "rope_scaling_factor",
        ),
        "parallel": ("tp", "pp", "vpp", "cp", "ep", "dp"),
        "data": ("seq_length", "window", "block_tokens", "block_window", "balance_steps"),
        "train": ("iterations", "global_batch_size"),
        "log": ("interval",),
        "validation": ("interval", "batches"),
        "checkpoint": ("interval", "keep"),
        "optimizer": ("decay_iters", "lr"),
    }
    for section, names in sections.items():
        for name in names:
            value = getattr(getattr(c, section), name)
            _require(
                value is None or value > 0,
                f"{section}.{name} must be positive, got {value}; set it to 1 or more",
            )
            _require(
                not isinstance(value, int) or value <= MOST,
                f"{section}.{name} must be at most {MOST:,}, got {value}; lower it",
            )
    _require(
        0 <= c.train.seed < 2**63,
        f"train.seed must be at least 0 and below 2^63, got {c.train.seed}; choose another",
    )


def _check_model(c: RunValues) -> None:
    m = c.model
    _require(
        m.head_dim is not None or m.hidden_size % m.num_attention_heads == 0,
        f"model.hidden_size must be a multiple of model.num_attention_heads, got {m.hidden_size} "
        f"and {m.num_attention_heads}; change one, or set model.head_dim",
    )
    _require(
        m.num_attention_heads % m.num_query_groups == 0,
        f"model.num_attention_heads must be a multiple of model.num_query_groups, got "
        f"{m.num_attention_heads} and {m.num_query_groups}; each key/value head serves as many "
        f"query heads",
    )
    _require(
        c.data.eod_token < m.vocab_size,
        f"data.eod_token must be below model.vocab_size, got {c.data.eod_token} and "
        f"{m.vocab_size}; both come from the tokenizer the data was packed with",
    )


def _check_parallel(c: RunValues) -> None:
    p, m = c.parallel, c.model
    for value, name in (
        (m.num_attention_heads, "model.num_attention_heads"),
        (m.num_query_groups, "model.num_query_groups"),
        (m.ffn_hidden_size, "model.ffn_hidden_size"),
        (m.padded_vocab_size, "the padded vocabulary"),
    ):
        _require(
            value % p.tp == 0,
            f"{name} must be a multiple of parallel.tp {p.tp}, got {value}; lower parallel.tp",
        )
    stages = p.pp * (p.vpp or 1)
    _require(
        m.num_layers % stages == 0,
        f"model.num_layers must be a multiple of pp * vpp = {stages}, got {m.num_layers}; "
        f"use {_ceil_to(m.num_layers, stages)} layers or fewer stages",
    )
    _require(
        p.vpp is None or p.pp > 1,
        f"parallel.vpp needs parallel.pp of 2 or more, got pp {p.pp}; set parallel.vpp=null",
    )
    _require(
        p.ep == 1,
        f"parallel.ep must be 1 for these models without experts, got {p.ep}; set parallel.ep=1",
    )
    _require(
        not p.sequence_parallel or p.tp > 1,
        f"parallel.sequence_parallel needs parallel.tp of 2 or more, got tp {p.tp}; "
        f"set parallel.sequence_parallel=false",
    )
    _require(
        not p.overlap_param_gather or (p.distributed_optimizer and p.overlap_grad_reduce),
        "parallel.overlap_param_gather needs parallel.distributed_optimizer and "
        "parallel.overlap_grad_reduce, got one of them off; switch them on, or this one off",
    )
    _require(
        c.attention == "magi" or p.cp == 1,
        f"attention: {c.attention} needs parallel.cp 1 (the baselines have no context "
        f"parallelism), got cp {p.cp}; set attention=magi or parallel.cp=1",
    )


def _check_train(c: RunValues) -> None:
    key = "optimizer.decay_iters" if c.optimizer.decay_iters else "train.iterations"
    decay, warmup = c.optimizer.decay_iters or c.train.iterations, c.optimizer.warmup_iters
    _require(
        0 <= warmup < decay,
        f"optimizer.warmup_iters must be at least 0 and below {key} {decay}, got {warmup}; "
        f"set optimizer.warmup_iters={decay // 10}"
        + (f", or {key} above {warmup}" if warmup > 0 else ""),
    )
    _require(
        all(i >= 1 for i in c.train.dump_gradients),
        f"train.dump_gradients must name iterations, which count from 1, got "
        f"{list(c.train.dump_gradients)}; leave out what is smaller",
    )
    _require(
        0 <= c.optimizer.min_lr <= c.optimizer.lr,
        f"optimizer.min_lr must lie between 0 and optimizer.lr {c.optimizer.lr}, got "
        f"{c.optimizer.min_lr}; lower it",
    )
    _require(
        c.data.path != "",
        "data.path must name packed data (PREFIX of PREFIX.bin and PREFIX.idx), got nothing; "
        "make it with megatron-magi data",
    )


def _check_mask(c: RunValues) -> None:
    d = c.data
    is_plain = c.attention in ("flex_plain", "sdpa")
    _require(
        not is_plain or (d.mask != "block_causal" and d.window is None),
        f"attention: {c.attention} needs data.mask document or causal without a window, got "
        f"{d.mask} with window {d.window}; use attention=dense as the baseline",
    )
    if d.mask == "block_causal":
        _require(
            d.block_tokens is not None,
            "data.mask block_causal needs the tokens of a block, got none; set data.block_tokens",
        )
        _require(
            d.window is None,
            f"data.mask block_causal has a window of blocks, got data.window {d.window} in tokens; "
            f"set data.block_window, and data.window=null",
        )
        return
    for name in ("block_tokens", "block_window"):
        value = getattr(d, name)
        _require(
            value is None,
            f"data.{name} needs data.mask block_causal, got {value} with mask {d.mask}; "
            f"set data.mask=block_causal or data.{name}=null",
        )


def _check_balance(c: RunValues) -> None:
    steps = c.data.balance_steps
    if steps is None:
        return
    _require(
        steps <= c.train.iterations,
        f"data.balance_steps must be at most train.iterations {c.train.iterations}, got {steps}; "
        f"4 to 16 is usual",
    )
    _require(
        steps * c.train.global_batch_size <= MAX_GROUP,
        f"data.balance_steps * train.global_batch_size must be at most {MAX_GROUP:,} samples, "
        f"whose costs are found before the first step, got {steps:,} * "
        f"{c.train.global_batch_size:,}; lower data.balance_steps",
    )


def _check_transport(c: RunValues) -> None:
    """What the machine lacks is found by the run."""
    kernel, nodes = c.magi.kernel_backend, c.magi.costs.ranks_per_node
    if c.attention != "magi" or c.parallel.cp == 1 or c.magi.transport != "symm_mem":
        return
    _require(
        c.train.dtype == "bf16" and kernel in ("auto", "cuda"),
        f"magi.transport {c.magi.transport} needs train.dtype bf16 and magi.kernel_backend auto or "
        f"cuda, got {c.train.dtype} and {kernel}; set magi.transport=auto",
    )
    _require(
        nodes is None or nodes >= c.parallel.cp,
        f"magi.transport {c.magi.transport} needs the parallel.cp {c.parallel.cp} ranks on one "
        f"node, got magi.costs.ranks_per_node {nodes}; set magi.transport=auto",
    )


def _check_validation(c: RunValues) -> None:
    v = c.validation
    _require(
        0 <= v.fraction < 1,
        f"validation.fraction must be at least 0 and below 1, got {v.fraction}; 0.02 is usual",
    )
    _require(
        v.interval is None or v.fraction > 0,
        f"validation.interval needs held-out documents, got interval {v.interval} and fraction "
        f"{v.fraction}; set validation.fraction=0.02",
    )


def misfits(section: str, values: Any) -> Iterator[str]:
    """A sentence for every bool, int or float field (or tuple of such) that holds something else.

    Args:
        values: One dataclass of a ``RunConfig``, which a file has filled or a caller.
    """
    for name, hint in get_type_hints(type(values)).items():
        kinds = {hint, *get_args(hint)}
        value = getattr(values, name)
        if value is None and type(None) in kinds:
            continue
        for item in value if isinstance(value, (tuple, list)) else (value,):
            wanted = next((w for kind, w, fits in _KINDS if kind in kinds and not fits(item)), None)
            if wanted:
                yield f"{section}.{name} must be {wanted}, got {shown(item)}; mend the recipe"


def _is_whole(value: Any) -> bool:
    return is_integer_like(value) and not is_bool(value)


def _is_finite(value: Any) -> bool:
    return (isinstance(value, float) or _is_whole(value)) and math.isfinite(value)


_KINDS: tuple[tuple[type, str, Callable[[Any], bool]], ...] = (
    (bool, "true or false", is_bool),
    (int, "a whole number", _is_whole),
    (float, "a finite number", _is_finite),
)
