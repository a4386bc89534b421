"""What the tests of gradients' dtypes run on every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

import megatron_magi as magi
from megatron_magi import HeadShape, masks
from megatron_magi.core.runtime import staged_backward
from tests.process_pool import on_subgroup


@on_subgroup
def dtype_of_sums(rank: int, group: Any) -> None:
    asked, home = [], staged_backward.KeyGradients

    def recorded(work: Any, k: Tensor, v: Tensor, dtype: torch.dtype) -> Any:
        asked.append(dtype)
        return home(work, k, v, dtype)

    plan = magi.plan(masks.causal(32), group, HeadShape(2, 1, 4))
    rows = plan.layout.num_local_tokens
    q, k = (torch.randn(rows, h, 4, dtype=torch.bfloat16, requires_grad=True) for h in (2, 1))
    with mock.patch.object(staged_backward, "KeyGradients", recorded):
        magi.dist_attn(q, k, k, plan, group)[0].sum().backward()
    assert asked == [torch.float32] and k.grad is not None and k.grad.dtype == torch.bfloat16
