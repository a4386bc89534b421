"""Masks, calls and bounds for launches whose library is a stand-in on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi import AttnMask, masks
from megatron_magi.core.kernel.backend import AttnCall, OutLse
from megatron_magi.core.kernel.slice_table import SliceTable

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMED = {
    "causal": masks.causal(200),
    "packed": masks.from_cu_seqlens([0, 1, 70, 200]),
    "window": masks.from_cu_seqlens([0, 150, 300], window_size=(40, 0)),
    "rows that see nothing": masks.from_ranges(
        [[10, 90]], [[0, 50]], [0], total_seqlen_q=120, total_seqlen_k=64
    ),
    "nothing": AttnMask([], 40, 30),
}


def case(
    mask: AttnMask,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = BF16,
    widths: tuple[int, int] = (64, 64),
) -> tuple[AttnCall, Tensor]:
    """A call and a gradient of its output; keys and values are parts of one tensor."""
    generator = torch.Generator().manual_seed(mask.total_seqlen_q + widths[0])
    num_q, num_k = mask.total_seqlen_q, mask.total_seqlen_k
    q, dout = (torch.randn(num_q, heads[0], width, generator=generator) for width in widths)
    kv = torch.randn(num_k, heads[1], sum(widths), generator=generator).to(dtype)
    k, v = kv.split(widths, -1)
    table = SliceTable(mask.slices, num_q, num_k)
    return AttnCall(q.to(dtype), k, v, table, 0.11), dout.to(dtype)


def exact(call: AttnCall) -> AttnCall:
    return call._replace(q=call.q.double(), k=call.k.double(), v=call.v.double())


def close(got: OutLse, want: OutLse, dtype: torch.dtype) -> None:
    atol = {BF16: 2e-2, FP16: 3e-3, FP32: 1e-5}[dtype]
    torch.testing.assert_close(got[0].double(), want[0], atol=atol, rtol=atol)
    torch.testing.assert_close(got[1].double(), want[1], atol=1e-5, rtol=1e-5)
