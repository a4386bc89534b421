"""Infinite values: nan where softmax has no value, on every kernel, and 0 only for unseen rows."""

from __future__ import annotations

import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel.flex_attn import flex_flash_attn_func
from tests.dense import dense_attention, random_qkv

MASKS = {
    "causal": masks.causal(160),
    "packed": masks.from_cu_seqlens([0, 40, 41, 160]),
    "window": masks.sliding_window(160, (30, 0)),
    "part": masks.from_dense(torch.ones(160, 160, dtype=torch.bool).tril(-70).numpy()),
}
CASES = {
    "reference": ("cpu", torch.float64),
    "flex": ("cuda", torch.float32),
    "cuda": ("cuda", torch.bfloat16),
}


@pytest.fixture(params=[
    "reference", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("flex", "cuda")),
])  # fmt: skip
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
@pytest.mark.parametrize("name", MASKS)
def test_a_row_of_infinite_scores_is_nan(name: str, value: float, kernel: str) -> None:
    """A query row with an infinite value and keys of one sign there: its scores are all -inf, or
    all inf. Rows that see nothing stay 0, whatever they hold."""
    device, dtype = CASES[kernel]
    mask = MASKS[name]
    q, k, v, _ = random_qkv(mask, 4, 2, 64, dtype, 3)
    with torch.no_grad():
        k[..., 7] = k[..., 7].abs() + 1
        for row in (3, 40, 69, 90, 159):
            q[row, 1, 7] = value
    q, k, v = (x.detach().to(device) for x in (q, k, v))
    out, meta = flex_flash_attn_func(q, k, v, slices=mask, backend=kernel)
    want, want_lse = dense_attention(q.double(), k.double(), v.double(), mask, 64**-0.5)
    assert torch.equal(out.isnan(), want.isnan()) and want.isnan().any()
    assert torch.equal(meta.lse.isnan(), want_lse.isnan())
    assert torch.equal(meta.lse.isinf(), want_lse.isinf())


@pytest.mark.parametrize("name", MASKS)
def test_its_gradient_reaches_all_that_it_sees(name: str) -> None:
    """And, as 0 times infinity is nan, maybe neighbours; see docs/kernel_notes.md."""
    mask, row = MASKS[name], 90
    q, k, v, dout = random_qkv(mask, 2, 1, 16, torch.float64, 3)
    with torch.no_grad():
        k[..., 7] = k[..., 7].abs() + 1
        q[row, 1, 7] = -torch.inf
    out, _ = flex_flash_attn_func(q, k, v, slices=mask, backend="reference")
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    sees = torch.from_numpy(mask.to_dense())[row]
    assert dk.isnan().any(-1).any(-1)[sees].all()
    assert dv.isnan().any(-1).any(-1)[sees].all()
    assert dq[row, 1].isnan().any()
