"""One mask per group of heads, against the definition for each group alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_magi import flex_flash_attn_by_head_group, flex_flash_attn_func, masks, slices_tensor
from megatron_magi.core.mask import AttnMask
from tests.dense import NAMES, assert_as_good_as_dense, random_qkv

T, HEADS_Q, HEADS_KV = 90, 8, 4


def block_masks(count: int) -> list[AttnMask]:
    blocks = np.random.default_rng(0).random((count, 6, 6)) < 0.5
    return [masks.from_block_mask(x, 16, T) for x in blocks]


def of_group(x: torch.Tensor, group: int, count: int) -> torch.Tensor:
    width = x.shape[1] // count
    return x[:, group * width : (group + 1) * width]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_group_has_its_own_mask(count: int, dtype: torch.dtype) -> None:
    chosen = block_masks(count)
    q, k, v, dout = random_qkv(chosen[0], HEADS_Q, HEADS_KV, (16, 8), dtype, 0)
    out, meta = flex_flash_attn_by_head_group(q, k, v, chosen)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    ours = dict(zip(NAMES, (out, meta.lse, *grads), strict=True))
    for group, mask in enumerate(chosen):
        inputs = [of_group(x, group, count) for x in (q, k, v, dout)]
        part = {name: of_group(x, group, count) for name, x in ours.items()}
        assert_as_good_as_dense(part, inputs, mask, dtype)


def test_options_and_largest_logits_reach_every_group() -> None:
    chosen = block_masks(2)
    q, k, v, _ = random_qkv(chosen[0], HEADS_Q, HEADS_KV, 16, torch.float32, 1)
    options: Any = {
        "softmax_scale": 0.3, "softcap": 0.7, "out_dtype": torch.float64, "return_max_logits": True
    }  # fmt: skip
    # Slices as tensors are the same masks.
    given: Any = [slices_tensor(chosen[0]), chosen[1]]
    out, meta = flex_flash_attn_by_head_group(q, k, v, given, **options)
    assert out.dtype == torch.float64 and meta.max_logits is not None
    for group, mask in enumerate(chosen):
        parts: Any = [of_group(x, group, 2) for x in (q, k, v)]
        want, want_meta = flex_flash_attn_func(*parts, slices=mask, **options)
        assert torch.equal(of_group(out, group, 2), want)
        assert torch.equal(of_group(meta.lse, group, 2), want_meta.lse)
        assert want_meta.max_logits is not None
        assert torch.equal(of_group(meta.max_logits[None], group, 2)[0], want_meta.max_logits)


@pytest.mark.parametrize("shape", [(3, HEADS_Q), (T, 2, HEADS_Q)], ids=["sh", "ssh"])
def test_every_group_has_its_own_heads_of_the_sinks(shape: tuple[int, ...]) -> None:
    chosen = block_masks(2)
    q, k, v, dout = random_qkv(chosen[0], HEADS_Q, HEADS_KV, 16, torch.float64, 2)
    sink = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out, _ = flex_flash_attn_by_head_group(q, k, v, chosen, sink=sink)
    (grad,) = torch.autograd.grad(out, sink, dout)
    heads = [slice(0, HEADS_Q // 2), slice(HEADS_Q // 2, HEADS_Q)]
    for group, mask in enumerate(chosen):
        parts: Any = [of_group(x, group, 2) for x in (q, k, v)]
        own = sink[..., heads[group]].detach().requires_grad_()
        want, _ = flex_flash_attn_func(*parts, slices=mask, sink=own)
        (want_grad,) = torch.autograd.grad(want, own, of_group(dout, group, 2))
        assert torch.equal(of_group(out, group, 2), want)
        assert torch.equal(grad[..., heads[group]], want_grad)


def test_sinks_of_one_group_are_not_sinks_of_all_heads() -> None:
    chosen = block_masks(2)
    q, k, v, _ = random_qkv(chosen[0], HEADS_Q, HEADS_KV, 16, torch.float32, 3)
    with pytest.raises(ValueError, match=f"H = {HEADS_Q}"):
        flex_flash_attn_by_head_group(q, k, v, chosen, sink=torch.zeros(1, HEADS_Q // 2))


@pytest.mark.parametrize(
    "slices, error, text",
    [
        ([], ValueError, "must divide the 4 key/value heads, got 0; pass one"),
        (block_masks(3), ValueError, "must divide the 4 key/value heads, got 3; pass one"),
        (block_masks(8), ValueError, "must divide the 4 key/value heads, got 8; pass one"),
        ([masks.causal(T), masks.causal(9)], ValueError, "must be for q's 90 and k's 90 tokens"),
    ],
)
def test_other_numbers_of_masks_are_refused(slices: Any, error: type, text: str) -> None:
    q, k, v, _ = random_qkv(masks.causal(T), HEADS_Q, HEADS_KV, 16, torch.float32, 2)
    with pytest.raises(error, match=text):
        flex_flash_attn_by_head_group(q, k, v, slices)
