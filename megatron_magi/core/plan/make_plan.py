"""Makes the plan of a mask: a token layout, and the transfers on it."""

from __future__ import annotations

from dataclasses import replace

from megatron_magi.checks import integer
from megatron_magi.config import MagiConfig
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.plan.attn_plan import AttnPlan, check_inputs
from megatron_magi.core.plan.cross_layout import key_layout_for, query_layouts
from megatron_magi.core.plan.head_shape import HeadShape
from megatron_magi.core.plan.limits import MAX_CP_SIZE, check_size
from megatron_magi.core.plan.plan_on import plan_on
from megatron_magi.core.plan.stage_times import predict_times
from megatron_magi.core.plan.token_layout import (
    LOAD_CAPS,
    Homes,
    TokenLayout,
    choose_token_layout,
    ranks_per_node,
)


def make_attn_plan(
    mask: AttnMask,
    cp_size: int,
    head_shape: HeadShape,
    config: MagiConfig,
    *,
    layout: TokenLayout | None = None,
    key_layout: TokenLayout | None = None,
    token_multiple: int = 1,
) -> AttnPlan:
    """Plan one mask on ``cp_size`` ranks. Equal inputs give equal plans on every machine.

    Args:
        layout: Plan on this layout, e.g. another layer's mask on the same tokens; None: choose.
        key_layout: Cross-attention, with keys that lie so, e.g. as an encoder's self-attention has
            left them. None: keys are the queries' tokens, or, in a mask with another number of
            keys, each chunk of keys goes to the rank that reads most of it.
        token_multiple: Every rank's number of rows is a multiple of it (the tensor-parallel size
            under sequence parallelism).

    Raises:
        TypeError: ``head_shape`` is no HeadShape.
        ValueError: a cp_size or token_multiple below 1, a fixed chunk_size that leaves a rank
            without a chunk (in cross-attention that rank has padding alone), a layout
            of another length, size or multiple, nodes with different numbers of ranks.
        PlanSizeError: (a ValueError) planning would take minutes or gigabytes; see limits.py.
    """
    cp_size = integer(cp_size, "cp_size")
    token_multiple = integer(token_multiple, "token_multiple")
    check_problem(mask, cp_size, head_shape, config, layout, token_multiple, key_layout)
    is_cross = key_layout is not None or mask.total_seqlen_q != mask.total_seqlen_k
    if is_cross:
        homes = _cross_homes(mask, cp_size, config, layout, key_layout, token_multiple)
    elif layout is not None:
        homes = [Homes(layout, layout)]
    else:
        homes = [Homes(each, each) for each in _layouts(mask, cp_size, config, token_multiple)]
    plans = [plan_on(each, mask, head_shape, config, is_cross=is_cross) for each in homes]
    return plans[0] if len(plans) == 1 else min(plans, key=predicted_us)


def _layouts(
    mask: AttnMask, cp_size: int, config: MagiConfig, token_multiple: int
) -> list[TokenLayout]:
    """Layouts to choose from in self-attention."""
    return [
        choose_token_layout(mask, cp_size, replace(config, max_imbalance=cap), token_multiple)
        for cap in load_caps(config, cp_size)
    ]


def load_caps(config: MagiConfig, cp_size: int) -> tuple[float, ...]:
    """Highest loads over the mean that a layout is chosen for, of which the best plan is taken."""
    caps = LOAD_CAPS if config.max_imbalance is None else (config.max_imbalance,)
    # Inside a node rows are cheap, and an unequal load never pays.
    return caps if ranks_per_node(config, cp_size) else caps[:1]


def check_problem(
    mask: AttnMask,
    cp_size: int,
    head_shape: HeadShape,
    config: MagiConfig,
    layout: TokenLayout | None,
    token_multiple: int,
    key_layout: TokenLayout | None = None,
) -> None:
    """Refuse what cannot be planned, or takes too long; the errors are those of make_attn_plan."""
    check_inputs(mask, head_shape, config, layout, key_layout)
    _check(mask, cp_size, layout, token_multiple)
    if key_layout is not None:
        _check_fit(
            key_layout, mask.total_seqlen_k, cp_size, 1,
            start="key_layout must be a token layout",
            remedy="pass the layout of the mask's keys, or none",
        )  # fmt: skip
    check_size(mask, cp_size, config, layout, token_multiple, key_layout)


def _cross_homes(
    mask: AttnMask,
    cp_size: int,
    config: MagiConfig,
    layout: TokenLayout | None,
    key_layout: TokenLayout | None,
    token_multiple: int,
) -> list[Homes]:
    """Layouts to choose from in cross-attention; those that are given stay."""
    queries = query_layouts(mask, cp_size, config, token_multiple) if layout is None else [layout]
    return [
        Homes(each, key_layout or key_layout_for(mask, each, config, token_multiple))
        for each in queries
    ]


def predicted_us(plan: AttnPlan) -> float:
    """Forward and backward of one layer on the slowest rank, by the cost table."""
    times = predict_times(plan)
    return times.forward_us + times.backward_us


def _check(mask: AttnMask, cp_size: int, layout: TokenLayout | None, token_multiple: int) -> None:
    if not 1 <= cp_size <= MAX_CP_SIZE:
        raise ValueError(
            f"cp_size must be between 1 and {MAX_CP_SIZE}, got {cp_size}; "
            f"pass the size of the context-parallel group"
        )
    if token_multiple < 1:
        raise ValueError(
            f"token_multiple must be >= 1, got {token_multiple}; "
            f"pass the tensor-parallel size under sequence parallelism, else 1"
        )
    if layout is not None:
        _check_fit(layout, mask.total_seqlen_q, cp_size, token_multiple)


def _check_fit(
    layout: TokenLayout,
    total: int,
    cp_size: int,
    token_multiple: int,
    start: str = "a second mask needs a token layout",
    remedy: str = "plan it on the layout of the batch it belongs to, or without one",
) -> None:
    """Check that a given token layout is one of this sequence, group and multiple.

    Args:
        start, remedy: the beginning and the end of the error.
    """
    for name, got, want in (
        ("total_seqlen", layout.total_seqlen, total),
        ("cp_size", layout.cp_size, cp_size),
        ("num_local_tokens % token_multiple", layout.num_local_tokens % token_multiple, 0),
    ):
        if got != want:
            raise ValueError(f"{start} with {name} = {want}, got {got}; {remedy}")
