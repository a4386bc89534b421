"""What attention over ranks holds and writes to: memory and strides. Run on every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import megatron_magi as magi
from megatron_magi import HeadShape, masks
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.reference import ReferenceBackend
from tests.core.runtime.runtime_jobs import SHAPE, staged
from tests.dense import random_qkv
from tests.process_pool import on_subgroup


@on_subgroup
def gradient_memory(rank: int, group: Any, degree: int) -> None:
    mask = masks.full(64)
    plan = magi.plan(mask, group, SHAPE, staged(degree))
    leaves = [
        magi.dispatch(x, plan, group).detach().requires_grad_()
        for x in random_qkv(mask, 4, 2, 8, torch.float32, 0)[:3]
    ]
    magi.dist_attn(*leaves, plan, group)[0].sum().backward()
    for leaf in leaves:
        assert leaf.grad.untyped_storage().nbytes() == leaf.nbytes


@on_subgroup
def odd_strides(rank: int, group: Any) -> None:
    """Dimensions of one element may have any stride; what the kernels write to has none such."""
    shape, seen = HeadShape(1, 1, 8), []
    plan = magi.plan(masks.causal(96), group, shape, staged(1))
    tokens = plan.layout.num_local_tokens
    leaves = [torch.randn(tokens, 8).unsqueeze(2).transpose(1, 2).requires_grad_() for _ in "qkv"]
    assert leaves[0].shape == (tokens, 1, 8) and leaves[0].stride() == (8, 1, 1)
    backward = ReferenceBackend.backward

    def spy(self: Any, call: AttnCall, grad: GradCall) -> Any:
        assert grad.dkv is not None and grad.dq is not None
        seen.extend(x.stride() for x in (grad.dq, *grad.dkv))
        return backward(self, call, grad)

    with mock.patch.object(ReferenceBackend, "backward", spy):
        magi.dist_attn(*leaves, plan, group)[0].sum().backward()
    assert seen and all(stride in ((8, 8, 1), (16, 8, 1)) for stride in seen), seen
