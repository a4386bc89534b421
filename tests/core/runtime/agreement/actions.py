"""Calls that one rank, the odd one, makes otherwise than the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import megatron_magi as magi
from megatron_magi import AttnPlan, HeadShape, MagiConfig
from megatron_magi.core.runtime.agreement.comparison import agree_on_batch
from megatron_magi.core.runtime.dist_attn import dist_attn_and_max_logits

SHAPE = HeadShape(2, 1, 4)
CONFIG = MagiConfig(agreement_timeout_s=20)
TOKENS = 512

Action = Callable[[AttnPlan, AttnPlan, Any, bool], object]
"""(plan, another plan, group, whether this rank is the odd one)."""


def tokens(plan: AttnPlan, group: Any, heads: int, **given: Any) -> torch.Tensor:
    return magi.dispatch(torch.randn(TOKENS, heads, 4, **given), plan, group)


def qkv(plan: AttnPlan, group: Any, **given: Any) -> list[torch.Tensor]:
    return [tokens(plan, group, heads, **given) for heads in (2, 1, 1)]


def undispatch_of_another_plan(plan: AttnPlan, other: AttnPlan, group: Any, odd: bool) -> None:
    x = torch.zeros(plan.layout.num_local_tokens, 1)
    magi.undispatch(x, other if odd else plan, group)


def gradient_of_another_batch(plan: AttnPlan, other: AttnPlan, group: Any, odd: bool) -> None:
    """Both plans were agreed on; the odd rank ends with the other one's batch."""
    magi.agree(plan, group), magi.agree(other, group)
    leaves = [torch.zeros(TOKENS, 1, requires_grad=True) for _ in range(2)]
    of_plan, of_other = (
        magi.dispatch(x, p, group) for x, p in zip(leaves, (plan, other), strict=True)
    )
    (of_other if odd else of_plan).sum().backward()


def roll_by_another_shift(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    magi.shift_tokens(tokens(plan, group, 1), 2 if odd else 1, plan, group)


def roll_of_another_dtype(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    dtype = torch.float64 if odd else torch.float32
    magi.shift_tokens(tokens(plan, group, 1, dtype=dtype), 1, plan, group)


def another_batch(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    agree_on_batch(plan, group, 2**64 - 1 if odd else 2**63, torch.device("cpu"))


def attention_of_another_scale(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    magi.dist_attn(*qkv(plan, group), plan, group, magi.Softmax(0.5 if odd else 0.25))


def attention_of_another_softcap(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    magi.dist_attn(*qkv(plan, group), plan, group, magi.Softmax(softcap=50.0 if odd else 30.1))


def sinks_on_some_ranks(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    q, k, v = qkv(plan, group)
    sink = None if odd else torch.zeros(1, q.shape[1])
    magi.dist_attn(q, k, v, plan, group, magi.Softmax(sink=sink))


def sinks_per_token_on_some_ranks(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    q, k, v = qkv(plan, group)
    sink = torch.zeros(len(q) if odd else 1, 1, q.shape[1])
    magi.dist_attn(q, k, v, plan, group, magi.Softmax(sink=sink if odd else sink[0]))


def attention_of_another_dtype(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    dtype = torch.float64 if odd else torch.float32
    magi.dist_attn(*qkv(plan, group, dtype=dtype), plan, group)


def attention_of_other_heads(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    """Each rank's tensors fit its own plan, as where one of them has another model config."""
    heads = 2 if odd else 1
    own = magi.plan(plan.mask, group, HeadShape(2, heads, 4), CONFIG)
    q, k = tokens(own, group, 2), tokens(own, group, heads)
    magi.dist_attn(q, k, k, own, group)


def gradient_on_some_ranks(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    magi.dist_attn(*qkv(plan, group, requires_grad=not odd), plan, group)


def largest_logits_of_another_scale(
    plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool
) -> None:
    dist_attn_and_max_logits(*qkv(plan, group), plan, group, magi.Softmax(0.5 if odd else 0.25))


def largest_logits_on_some_ranks(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    attention = magi.dist_attn if odd else dist_attn_and_max_logits
    attention(*qkv(plan, group), plan, group)


def another_call(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    q, k, v = qkv(plan, group)
    if odd:
        magi.undispatch(q, plan, group)
    else:
        magi.dist_attn(q, k, v, plan, group)


def another_sum_of_gradients(plan: AttnPlan, _other: AttnPlan, group: Any, odd: bool) -> None:
    magi.undispatch(tokens(plan, group, 1), plan, group, is_partial_grad=odd)
