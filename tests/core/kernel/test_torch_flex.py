"""FlexAttention as a backend: results against the reference and against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel import torch_flex
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.flex_block_mask import (
    block_mask,
    clear_empty_rows,
    empty_rows,
    strips_of,
)
from megatron_magi.core.kernel.merge import merge_
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.kernel.split_slices import MOST_COMPARED, table_parts
from megatron_magi.core.kernel.torch_flex import FlexBackend
from megatron_magi.core.mask import AttnMask
from tests.dense import NAMES, assert_as_good_as_dense, random_qkv

CPU = torch.device("cpu")


def comb(count: int) -> AttnMask:
    """``count`` pairs of keys, each seen by rows of its own: most rows see all pairs, the last rows
    none. The band cuts corners off."""
    end = 3 * count
    slices = [
        [2 * i % 37, 140 - 20 * (i % 2), 3 * i, 3 * i + 2, -120, end - 20] for i in range(count)
    ]
    return AttnMask(np.array(slices, np.int32), 150, end + 5)


MASKS = {
    "full": masks.full(200, 300),
    "causal": masks.causal(260),
    "documents": masks.from_cu_seqlens([0, 5, 133, 134, 300]),
    "window": masks.sliding_window(300, (40, 0)),
    "two-slices-a-row": masks.global_and_window([0, 300], (30, 0), 17),
    "holes": AttnMask(
        np.array([[10, 100, 20, 150, -79, 139], [150, 200, 5, 33, -190, -120]], np.int32), 220, 180
    ),
    "nothing": AttnMask(np.zeros((0, 6), np.int32), 20, 30),
    "33-slices-a-row": comb(33),
}


def test_one_shape_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would compute it uncompiled, with all scores in memory."""
    monkeypatch.setattr(torch_flex, "MOST_SHAPES", 2)

    def increment(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch_flex._compiled(increment, backend="eager")
    assert [compiled(torch.zeros(n)).tolist() for n in (2, 3, 2)] == [[1, 1], [1, 1, 1], [1, 1]]
    with pytest.raises(NotImplementedError, match="at most 2 shapes, got one more; use fewer"):
        compiled(torch.zeros(4))


ALL_WIDTHS = [(32, 32), pytest.param((48, 32), marks=pytest.mark.slow)]
"""Of keys and of values; each is compiled for every mask."""


def inputs(
    mask: AttnMask, device: torch.device, dtype: torch.dtype, widths: tuple[int, int] = (32, 32)
) -> list[torch.Tensor]:
    """q, k, v and dout; widths of keys and of values."""
    gen = torch.Generator().manual_seed(0)
    rows, keys, (wide, value) = mask.total_seqlen_q, mask.total_seqlen_k, widths
    shapes = [(rows, 4, wide), (keys, 2, wide), (keys, 2, value), (rows, 4, value)]
    return [torch.randn(*shape, generator=gen).to(device=device, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("widths", ALL_WIDTHS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_forward_is_the_reference(name: str, widths: tuple[int, int]) -> None:
    table = SliceTable.of(MASKS[name])
    q, k, v, _ = inputs(MASKS[name], CPU, torch.float32, widths)
    out, lse = FlexBackend().forward(AttnCall(q, k, v, table, 0.2))
    want_out, want_lse = ReferenceBackend().forward(AttnCall(q, k, v, table, 0.2))
    torch.testing.assert_close(out, want_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["causal", "33-slices-a-row"])
def test_capped_forward_is_the_reference(name: str) -> None:
    q, k, v, _ = inputs(MASKS[name], CPU, torch.float32)
    call = AttnCall(q, k, v, SliceTable.of(MASKS[name]), 0.2, softcap=0.7)
    out, lse = FlexBackend().forward(call)
    want_out, want_lse = ReferenceBackend().forward(call)
    torch.testing.assert_close(out, want_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("asked", [None, torch.float64, torch.bfloat16])
def test_out_has_the_dtype_that_is_asked_for(asked: torch.dtype | None) -> None:
    mask = MASKS["causal"]
    q, k, v, _ = inputs(mask, CPU, torch.bfloat16)
    out, lse = FlexBackend().forward(AttnCall(q, k, v, SliceTable.of(mask), 0.2), out_dtype=asked)
    assert (out.dtype, lse.dtype) == (asked or torch.bfloat16, torch.float32)


def test_forward_continues_in_place() -> None:
    mask = MASKS["causal"]
    table = SliceTable.of(mask)
    q, k, v, _ = inputs(mask, CPU, torch.float32)
    earlier = ReferenceBackend().forward(AttnCall(q, v, k, table, 0.2))
    want = tuple(x.clone() for x in earlier)
    merge_(*want, *ReferenceBackend().forward(AttnCall(q, k, v, table, 0.2)))
    got = FlexBackend().forward(AttnCall(q, k, v, table, 0.2), prev=earlier)
    assert got[0] is earlier[0] and got[1] is earlier[1]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def check_backward(
    name: str, device: torch.device, dtype: torch.dtype, tol: float, widths: tuple[int, int],
    softcap: float = 0.0,
) -> None:  # fmt: skip
    """One stage of two: its keys are the mask's, the other stage has moved lse and delta."""
    mask = MASKS[name]
    table = SliceTable.of(mask)
    q, k, v, dout = inputs(mask, device, dtype, widths)
    call = AttnCall(q, k, v, table, 0.2, softcap=softcap)
    out, lse = ReferenceBackend().forward(call, out_dtype=torch.float32)
    merge_(out, lse, torch.randn_like(out), torch.zeros_like(lse))
    delta = (out * dout).sum(-1)
    want = ReferenceBackend().backward(call, GradCall(dout, lse, delta))
    before = torch.randn_like(want[0])
    dq_acc = before.clone()
    dq, dk, dv = FlexBackend().backward(call, GradCall(dout, lse, delta, dq=dq_acc))
    assert dq is dq_acc and dk.dtype == torch.float32
    for got, expected in zip((dq - before, dk, dv), want, strict=True):
        torch.testing.assert_close(got, expected, atol=tol, rtol=tol)


def dense_flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, score_mod: Any, block_mask: Any,
    scale: float, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What flex_attention computes, differentiable: PyTorch's has no backward on the CPU.

    Like it, a row that sees nothing has probabilities of 0, by which its gradients are multiplied.
    """
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = block_mask.mask_mod(0, 0, rows, keys)
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    empty = ~seen.any(-1, keepdim=True)
    scores = q @ k.mT * scale
    if score_mod is not None:
        scores = score_mod(scores, 0, 0, rows, keys)
    scores = scores.masked_fill(~seen & ~empty, -torch.inf)
    lse = scores.logsumexp(-1).masked_fill(empty[:, 0], -torch.inf)
    return scores.softmax(-1).masked_fill(empty, 0.0) @ v, lse


@pytest.mark.parametrize("widths", ALL_WIDTHS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_backward_of_a_stage_is_the_reference(
    name: str, widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_flex, "_flex", lambda device_type: dense_flex)
    check_backward(name, CPU, torch.float32, 1e-4, widths)
    check_backward(name, CPU, torch.float32, 1e-4, widths, softcap=0.7)


def check_against_fp64(
    mask: AttnMask, device: str, dtype: torch.dtype, before_backward: Callable[[], None]
) -> None:
    q, k, v, dout = random_qkv(mask, 4, 2, 32, dtype, 0, device)
    call = AttnCall(q.detach(), k.detach(), v.detach(), SliceTable.of(mask), 32**-0.5)
    out, lse = FlexBackend().forward(call)
    before_backward()
    grads = FlexBackend().backward(call, GradCall(dout, lse, out=out, dtype=dtype))
    ours = dict(zip(NAMES, (out, lse, *grads), strict=True))
    assert_as_good_as_dense(ours, (q, k, v, dout), mask, dtype)


@pytest.mark.parametrize(
    "count, dtype",
    [
        (33, torch.float32),
        (100, torch.bfloat16),
        pytest.param(300, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_many_slices_a_row_against_fp64(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert strips_of(SliceTable.of(comb(count))).most == count > MOST_COMPARED

    def use_dense() -> None:
        monkeypatch.setattr(torch_flex, "_flex", lambda device_type: dense_flex)

    check_against_fp64(comb(count), "cpu", dtype, use_dense)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [33, pytest.param(100, marks=pytest.mark.slow), 300])
def test_many_slices_a_row_on_a_gpu(count: int, dtype: torch.dtype) -> None:
    check_against_fp64(comb(count), "cuda", dtype, lambda: None)


def test_rows_that_see_nothing_are_cleared_whatever_a_kernel_returns() -> None:
    """PyTorch versions differ in what they return for them."""
    table = SliceTable.of(MASKS["holes"])
    made = torch.ones(table.num_q, 2, 16, requires_grad=True)
    unseen = torch.from_numpy(unseen_rows(table))
    assert 0 < unseen.sum() < table.num_q
    out, lse = clear_empty_rows(made * 1, torch.zeros(table.num_q, 2), table)
    assert (out[unseen] == 0).all() and (out[~unseen] == 1).all()
    assert lse[unseen].isneginf().all() and (lse[~unseen] == 0).all()
    (grad,) = torch.autograd.grad(out.sum(), made)
    assert torch.equal(grad, out)


def unseen_rows(table: SliceTable) -> np.ndarray:
    empty = empty_rows(table, CPU)
    return np.zeros(table.num_q, dtype=bool) if empty is None else empty.numpy()[:, 0]


def test_parts_share_one_compiled_function() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    ran: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        ran.append(graph)
        return graph.forward

    compiled = torch_flex._compiled(flex_attention, backend=backend)
    for count in (2 * MOST_COMPARED, 3 * MOST_COMPARED):
        mask = comb(count)
        x = [
            t[None].transpose(1, 2)
            for t in map(torch_flex.padded, inputs(mask, CPU, torch.float32)[:3])
        ]
        for part in table_parts(SliceTable.of(mask)):
            compiled(*x, block_mask=block_mask(part, CPU, MOST_COMPARED), enable_gqa=True)
    assert len(ran) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("widths", [(32, 32), (192, 128)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_compiled_backward_on_a_gpu(name: str, widths: tuple[int, int]) -> None:
    check_backward(name, torch.device("cuda"), torch.bfloat16, 5e-2, widths)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["causal", "holes"])
def test_compiled_backward_of_capped_logits_on_a_gpu(name: str) -> None:
    check_backward(name, torch.device("cuda"), torch.bfloat16, 5e-2, (32, 32), softcap=0.7)


def test_what_it_cannot_do_is_refused() -> None:
    table = SliceTable.of(masks.causal(8))
    x = torch.zeros(8, 1, 32, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"takes bf16, fp16 and fp32.*cast"):
        FlexBackend().forward(AttnCall(x, x, x, table, 1.0))
    x, wide = torch.zeros(8, 1, 8), torch.zeros(8, 1, 16)
    for q, v in ((x, x), (wide, x)):
        with pytest.raises(NotImplementedError, match=r"head_dim 16 or more, got 8; pad"):
            FlexBackend().forward(AttnCall(q, q, v, table, 1.0))
