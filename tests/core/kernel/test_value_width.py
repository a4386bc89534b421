"""Kernels on values of another width than keys; which kernel takes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import AttnMask, masks
from megatron_magi.core.kernel import select
from megatron_magi.core.kernel.attention import flex_flash_attn_func
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.hopper import checks
from megatron_magi.core.kernel.sink import apply_sink
from megatron_magi.core.kernel.slice_table import SliceTable, slices_tensor
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


def test_the_op_and_meta_tensors() -> None:
    slices = slices_tensor(masks.causal(6))
    q, k, v, _ = random_qkv(masks.causal(6), 4, 2, (8, 6), torch.float64, 0)
    args = (q, k, v, slices, 0.3, torch.float64, "auto", False)
    torch.library.opcheck(torch.ops.magi.attn_fwd.default, args)
    out, meta = flex_flash_attn_func(*(x.to("meta") for x in (q, k, v)), slices=slices)
    assert out.shape == (6, 4, 6) and meta.lse.shape == (6, 4)


def test_a_sink_joins_values_of_any_width() -> None:
    mask = masks.causal(9)
    q, k, v, _ = random_qkv(mask, 4, 2, (8, 6), torch.float64, 0)
    out, meta = flex_flash_attn_func(q, k, v, slices=mask)
    with_sink, _ = apply_sink(out, meta.lse, torch.zeros(1, 4, dtype=torch.float64))
    weight = meta.lse.exp() / (meta.lse.exp() + 1)
    torch.testing.assert_close(with_sink, out * weight.unsqueeze(-1))


def test_auto_is_flex_on_hopper_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "is_hopper", lambda device: True)
    gpu = torch.device("cuda")
    assert select.choose_backend_name(gpu, torch.bfloat16) == "cuda"
    assert select.choose_backend_name(gpu, torch.bfloat16, one_width=False) == "flex"
    assert select.choose_backend_name(gpu, torch.float32, one_width=False) == "reference"
    assert select.select_backend("auto", gpu, torch.bfloat16, one_width=False).name == "flex"
    text = r"as wide as queries and keys, got another width; use kernel_backend 'flex' or"
    with pytest.raises(NotImplementedError, match=text):
        select.select_backend("cuda", gpu, torch.bfloat16, one_width=False)
    x, v = torch.zeros(4, 2, 128, dtype=torch.bfloat16), torch.zeros(4, 2, 64)
    text = r"got head_dim 64 and 128; use kernel_backend 'flex' or 'reference'"
    with pytest.raises(NotImplementedError, match=text):
        checks.check_call(AttnCall(x, x, v, SliceTable(masks.causal(4).slices, 4, 4), 0.1))
