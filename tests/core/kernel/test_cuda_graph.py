"""Attention of a fixed mask, captured into a CUDA graph and replayed with other values."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import megatron_magi as magi
from megatron_magi import AttnMask, masks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


def random_inputs(tokens: int, seed: int) -> list[Tensor]:
    gen = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(tokens, heads, 128, generator=gen, device="cuda").bfloat16()
        for heads in (8, 2, 2, 8)
    ]


def attend(mask: AttnMask, qkv: list[Tensor], dout: Tensor) -> list[Tensor]:
    """out, lse and the gradients."""
    out, meta = magi.flex_flash_attn_func(*qkv, slices=mask)
    return [out, meta.lse, *torch.autograd.grad(out, qkv, dout)]


@pytest.mark.parametrize(
    "mask",
    [masks.causal(700), masks.from_cu_seqlens([0, 5, 300, 640], window_size=(99, 0))],
    ids=["causal", "packed window"],
)
def test_replays_give_the_bits_of_calls(mask: AttnMask) -> None:
    tokens = mask.total_seqlen_q
    *qkv, dout = random_inputs(tokens, 0)
    for x in qkv:
        x.requires_grad_()
    attend(mask, qkv, dout)  # uploads the tables
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(mask, qkv, dout)
    for seed in (1, 2, 3):
        with torch.no_grad():
            for x, new in zip((*qkv, dout), random_inputs(tokens, seed), strict=True):
                x.copy_(new)
        gc.collect()
        churn = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(8)]
        del churn  # memory that the graph reads must not be anyone else's
        graph.replay()
        replayed = [x.clone() for x in results]
        for got, wanted in zip(replayed[:2], attend(mask, qkv, dout)[:2], strict=True):
            assert torch.equal(got, wanted)
        for got, wanted in zip(replayed[2:], attend(mask, qkv, dout)[2:], strict=True):
            # dq is added in no fixed order.
            torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-7)


def test_a_graph_of_the_stream_that_calls_ran_on_outlives_its_mask() -> None:
    """What the graph reads stays, although the stream was used before and the mask is gone."""
    *qkv, dout = random_inputs(500, 0)
    for x in qkv:
        x.requires_grad_()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        attend(masks.causal(500), qkv, dout)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = attend(masks.causal(500), qkv, dout)
    wanted = [x.detach().clone() for x in attend(masks.causal(500), qkv, dout)[:2]]
    for seed in range(300):  # other masks, until this one's tables are in no cache
        magi.flex_flash_attn_func(*qkv, slices=masks.from_cu_seqlens([0, 1 + seed, 500]))
    graph.replay()
    assert all(map(torch.equal, results[:2], wanted))


def test_a_first_call_is_not_captured() -> None:
    mask = masks.from_cu_seqlens([0, 77, 201])
    qkv = random_inputs(201, 0)[:3]
    needed = pytest.raises(RuntimeError, match="on the device before a CUDA graph")
    with needed, torch.cuda.graph(torch.cuda.CUDAGraph()):
        magi.flex_flash_attn_func(*qkv, slices=mask)
    out, _ = magi.flex_flash_attn_func(*qkv, slices=mask)
    assert out.isfinite().all()
