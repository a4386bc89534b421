"""What the tests of two widths run on every rank. Each function asserts by itself."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_magi as magi
from megatron_magi import HeadShape, masks
from tests.core.runtime.runtime_jobs import staged
from tests.process_pool import on_subgroup


@on_subgroup
def bytes_on_the_wire(
    rank: int, group: Any, shape: HeadShape, degree: int | str, in_fp32: bool
) -> None:
    """A received row costs its key and its value in their own widths, going out and coming home."""
    mask = masks.from_cu_seqlens([0, 5, 70, 71, 100, 128])
    plan = magi.plan(mask, group, shape, staged(degree, dkv_reduce_in_fp32=in_fp32))
    q, k, v = local_qkv(plan.layout.num_local_tokens, shape)
    magi.dist_attn(q, k, v, plan, group)  # the ranks compare their plans once
    counted: list[tuple[int, int]] = []
    exchange = dist.all_to_all_single

    def spy(recv: Tensor, send: Tensor, *args: Any, **given: Any) -> Any:
        counted.append((recv.nbytes, send.nbytes))
        return exchange(recv, send, *args, **given)

    with mock.patch.object(dist, "all_to_all_single", spy):
        out, _ = magi.dist_attn(q, k, v, plan, group)
        casts = len(counted)
        out.sum().backward()
    received = int(plan.rows_received[rank])
    sent = sum(end - start for _, _, src, start, end in plan.transfers.tolist() if src == rank)
    assert received + sent > 0
    row = shape.kv_row_bytes
    assert row == shape.num_heads_kv * (shape.head_dim + shape.value_dim) * 2
    home = row * (2 if in_fp32 else 1)
    total = [sum(both) for both in zip(*counted[:casts], strict=True)]
    assert total == [received * row, sent * row]
    total = [sum(both) for both in zip(*counted[casts:], strict=True)]
    assert total == [received * row + sent * home, sent * row + received * home]


def local_qkv(tokens: int, shape: HeadShape) -> list[Tensor]:
    widths = {
        "q": (shape.num_heads_q, shape.head_dim),
        "k": (shape.num_heads_kv, shape.head_dim),
        "v": (shape.num_heads_kv, shape.value_dim),
    }
    return [
        torch.randn(tokens, *width, dtype=torch.bfloat16).requires_grad_()
        for width in widths.values()
    ]
