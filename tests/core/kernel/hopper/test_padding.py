"""Heads padded to the widths of a kernel, and results brought back to the caller's widths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_magi import masks
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.head_dims import HeadDims
from megatron_magi.core.kernel.hopper import padding
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import SliceTable

F64 = torch.float64
MASK = masks.from_cu_seqlens([0, 5, 12], total_seqlen=14)
WIDE = HeadDims(8, 7)


def narrow_call() -> tuple[AttnCall, Tensor]:
    """Heads of 5 and 3, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(14, heads, width, generator=generator, dtype=F64)
                     for heads, width in ((4, 5), (2, 5), (2, 3), (4, 3)))  # fmt: skip
    return AttnCall(q, k, v, SliceTable(MASK.slices, 14, 14), 0.3), dout


def test_a_padded_call_has_zeros_behind_the_heads() -> None:
    call, _ = narrow_call()
    wide = padding.padded_call(call._replace(max_logits=torch.zeros(4)), WIDE)
    for x, padded in zip(call[:3], wide[:3], strict=True):
        assert torch.equal(padded[..., : x.shape[-1]], x) and not padded[..., x.shape[-1] :].any()
    assert (wide.q.shape[2], wide.k.shape[2], wide.v.shape[2]) == (8, 8, 7)
    assert wide.table is call.table and wide.softmax_scale == 0.3 and wide.max_logits is not None


def test_what_is_wide_enough_is_not_copied() -> None:
    call, _ = narrow_call()
    wide = padding.padded_call(call, HeadDims(5, 7))
    assert wide.q is call.q and wide.k is call.k and wide.v is not call.v


@pytest.mark.parametrize("way", ["new", "merged", "filled"])
def test_outputs(way: str) -> None:
    call, _ = narrow_call()
    plain = ReferenceBackend()
    made = plain.forward(padding.padded_call(call, WIDE))
    want = plain.forward(call)
    if way == "new":
        out, lse = padding.deliver_output(made, call, None, None)
        assert out.is_contiguous()
    elif way == "merged":
        prev = plain.forward(call._replace(k=call.k.flip(0)))
        want = plain.forward(call, prev=tuple(x.clone() for x in prev))
        out, lse = padding.deliver_output(made, call, prev, None)
        assert out is prev[0] and lse is prev[1]
    else:
        into = torch.full((14, 4, 3), 7.0, dtype=F64), torch.full((14, 4), 7.0, dtype=F64)
        out, lse = padding.deliver_output(made, call, None, into)
        assert out is into[0] and (out[12:] == 7).all() and (lse[12:] == 7).all()
        out, lse, want = out[:12], lse[:12], (want[0][:12], want[1][:12])
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse, want[1])


@pytest.mark.parametrize("given", [False, True])
def test_gradients(given: bool) -> None:
    """Into new tensors, or added to dq and written to dk and dv that the caller has."""
    call, dout = narrow_call()
    plain = ReferenceBackend()
    out, lse = plain.forward(call)
    grad = GradCall(dout, lse, out=out)
    want = plain.backward(call, grad)
    if given:
        targets = torch.full((14, 2, 5), 7.0, dtype=F64), torch.full((14, 2, 3), 7.0, dtype=F64)
        grad = grad._replace(dq=torch.ones(14, 4, 5, dtype=F64), dkv=targets)
    wide = padding.padded_call(call, WIDE)
    made = plain.backward(wide, padding.padded_grad(grad, wide))
    dq, dk, dv = padding.deliver_gradients(made, call, grad)
    if given:
        assert grad.dkv is not None and dq is grad.dq and dk is grad.dkv[0] and dv is grad.dkv[1]
        dq = dq - 1
    for got, exact in zip((dq, dk, dv), want, strict=True):
        torch.testing.assert_close(got, exact)


def test_the_padded_output_is_rounded_once() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    pair = torch.zeros(1, 1, 1, dtype=bf16), torch.zeros(1, 1)
    assert padding.padded_dtype(pair, None, bf16) == fp32, "it will be merged"
    assert padding.padded_dtype(None, pair, fp32) == bf16, "as what it is written into"
    assert padding.padded_dtype(None, None, fp32) == fp32
    assert padding.padded_dtype(None, None, None) is None
