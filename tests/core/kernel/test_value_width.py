"""Kernels on values of another width than keys, and on heads that the kernels pad."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import AttnMask, masks
from megatron_magi.core.kernel.attention import flex_flash_attn_func
from tests.dense import compare, random_mask, random_qkv

MASKS = {
    "causal": masks.causal(37),
    "packed": masks.from_cu_seqlens([0, 1, 9, 30, 31]),
    "window": masks.from_cu_seqlens([0, 20, 41], window_size=(5, 2), causal=False),
    "pad rows": masks.from_cu_seqlens([0, 3, 8], total_seqlen=11),
    "nothing": AttnMask([], 5, 7),
}
WIDTHS = [(12, 8), (8, 12), (4, 1), (192, 128)]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_named_masks(name: str, widths: tuple[int, int], dtype: torch.dtype) -> None:
    compare(MASKS[name], *random_qkv(MASKS[name], 4, 2, widths, dtype, seed=len(name)))


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 2, 4]))
@settings(max_examples=60, deadline=None)
def test_random_masks_are_exact_in_fp64(seed: int, keys: int, values: int, groups: int) -> None:
    mask = random_mask(seed, 24, 20)
    compare(mask, *random_qkv(mask, 4, groups, (keys, values), torch.float64, seed))


def test_a_sink_joins_values_of_any_width() -> None:
    mask = masks.causal(9)
    q, k, v, _ = random_qkv(mask, 4, 2, (8, 6), torch.float64, 0)
    out, meta = flex_flash_attn_func(q, k, v, slices=mask)
    sink = torch.zeros(1, 4, dtype=torch.float64)
    with_sink, _ = flex_flash_attn_func(q, k, v, slices=mask, sink=sink)
    weight = meta.lse.exp() / (meta.lse.exp() + 1)
    torch.testing.assert_close(with_sink, out * weight.unsqueeze(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(80, 80), (96, 96), (24, 40), (160, 100)], ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_padded_heads_on_the_kernels(name: str, widths: tuple[int, int]) -> None:
    q, k, v, dout = random_qkv(MASKS[name], 4, 2, widths, torch.bfloat16, seed=len(name))
    compare(MASKS[name], q.cuda(), k.cuda(), v.cuda(), dout.cuda())
