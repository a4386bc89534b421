"""Slices that are given as slices, as a mask or as ranges."""

import gc
import math

import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel import given_slices
from megatron_magi.core.kernel.attention import flex_flash_attn_func
from megatron_magi.core.kernel.slice_table import slices_tensor
from tests.core.kernel.test_attention import tensors
from tests.dense import dense_attention, random_qkv


def test_ranges_with_type_codes() -> None:
    q_ranges = torch.tensor([[0, 10], [10, 25]], dtype=torch.int32)
    types = torch.tensor([1, 2], dtype=torch.int32)
    mask = masks.from_ranges(q_ranges.numpy(), q_ranges.numpy(), types.numpy(), total_seqlen_q=25)
    q, k, v, _ = random_qkv(mask, 2, 2, 4, torch.float64, 1)
    out, meta = flex_flash_attn_func(q, k, v, q_ranges, q_ranges, types)
    want, lse = dense_attention(q, k, v, mask, 0.5)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(meta.lse, lse)


def test_ranges_changed_in_place_are_noticed() -> None:
    ranges = torch.tensor([[0, 8]], dtype=torch.int32)
    q, k, v, _ = random_qkv(masks.full(8), 1, 1, 4, torch.float64, 1)
    flex_flash_attn_func(q, k, v, ranges, ranges)
    ranges[0, 1] = 5
    _, meta = flex_flash_attn_func(q, k, v, ranges, ranges)
    assert (meta.lse[5:] == -math.inf).all() and meta.lse[:5].isfinite().all()
    slices = slices_tensor(masks.full(8))
    flex_flash_attn_func(q, k, v, slices=slices)
    slices[0, 1] = 3
    _, meta = flex_flash_attn_func(q, k, v, slices=slices)
    assert (meta.lse[3:] == -math.inf).all()


def test_remembered_ranges_die_with_their_tensor() -> None:
    q, k, v, _ = random_qkv(masks.full(8), 1, 1, 4, torch.float64, 1)
    gc.collect()
    before = len(given_slices._range_tensors)
    for types in (None, torch.tensor([1])):
        ranges = torch.tensor([[0, 8]])
        flex_flash_attn_func(q, k, v, ranges, ranges, types)
    flex_flash_attn_func(q, k, v)
    del ranges, types
    gc.collect()
    assert len(given_slices._range_tensors) == before


@pytest.mark.parametrize("kind", ["mask", "ranges"])
def test_training_after_inference_with_the_same_mask(kind: str) -> None:
    mask, ranges = masks.full(8), torch.tensor([[0, 8]])
    q, k, v, dout = random_qkv(mask, 1, 1, 4, torch.float64, 1)
    slices = {"slices": mask} if kind == "mask" else {"q_ranges": ranges, "k_ranges": ranges}
    with torch.inference_mode():
        flex_flash_attn_func(q, k, v, **slices)
    flex_flash_attn_func(q, k, v, **slices)[0].backward(dout)


def test_no_ranges_mean_full_attention_and_scale_is_used() -> None:
    q, k, v, _ = random_qkv(masks.full(6, 9), 2, 1, 4, torch.float64, 2)
    out, _ = flex_flash_attn_func(q, k, v, softmax_scale=0.1)
    torch.testing.assert_close(out, dense_attention(q, k, v, masks.full(6, 9), 0.1)[0])


def test_bad_slices_are_refused() -> None:
    x = tensors()
    ranges = torch.tensor([[0, 4]])
    for kwargs, text in (
        ({"slices": torch.zeros(1, 6)}, "slices must be int32"),
        ({"slices": torch.zeros(1, 5, dtype=torch.int32)}, r"got torch.int32 \[1, 5\]"),
        ({"q_ranges": ranges}, "must both be given"),
        ({"q_ranges": ranges, "k_ranges": ranges, "slices": masks.full(4)}, "got both"),
        ({"q_ranges": ranges + 1, "k_ranges": ranges}, r"q_end <= total_seqlen_q = 4"),
        ({"slices": masks.full(5)}, "q's 4 and k's 4 tokens, got one with total_seqlen_q = 5"),
        ({"slices": masks.full(3, 4)}, "got one with total_seqlen_q = 3"),
        ({"backend": "cudnn"}, "must be 'auto', 'cuda', 'fa4', 'flex' or 'reference', got 'cudnn'"),
    ):
        with pytest.raises(ValueError, match=text):
            flex_flash_attn_func(*x, **kwargs)
    double = torch.tensor([[0, 4], [0, 4]])
    with pytest.raises(ValueError, match="must not share a cell"):
        flex_flash_attn_func(*x, double, double)
    with pytest.raises(NotImplementedError, match="needs CUDA tensors, got cpu"):
        flex_flash_attn_func(*x, backend="cuda")
