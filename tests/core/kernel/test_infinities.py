"""Infinite values: nan where softmax has no value, on every kernel, and 0 only for unseen rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel import flash4
from megatron_magi.core.kernel.attention import flex_flash_attn_func
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.mask import AttnMask
from tests.dense import assert_as_good, dense_attention, random_qkv

MASKS = {
    "causal": masks.causal(160),
    "packed": masks.from_cu_seqlens([0, 40, 41, 160]),
    "window": masks.sliding_window(160, (30, 0)),
    "part": masks.from_dense(torch.ones(160, 160, dtype=torch.bool).tril(-70).numpy()),
}
CASES = {
    "reference": ("cpu", torch.float64),
    "flex": ("cuda", torch.float32),
    "fa4": ("cuda", torch.bfloat16),
    "cuda": ("cuda", torch.bfloat16),
}


@pytest.fixture(params=[
    "reference", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("flex", "fa4", "cuda")),
])  # fmt: skip
def kernel(request: pytest.FixtureRequest) -> str:
    if request.param != "reference" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if request.param == "fa4":
        pytest.importorskip(flash4.MODULE)
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


@pytest.mark.parametrize("softcap", [30.0, 100.0])
@pytest.mark.parametrize("name", MASKS)
def test_with_softcap_an_infinite_score_is_the_cap(name: str, softcap: float, kernel: str) -> None:
    """Also where a row has no others; a score of nan still takes its row away, hidden ones none."""
    device, dtype = CASES[kernel]
    mask = MASKS[name]
    q, k, v, _ = random_qkv(mask, 4, 2, 64, dtype, 3)
    with torch.no_grad():
        k[..., 7] = k[..., 7].abs() + 1
        q[3, 1, 7], q[90, 1, 7], q[100, 2, 7], q[159, 0, 7] = (
            float(x) for x in ("inf", "-inf", "nan", "inf")
        )
    q, k, v = (x.detach().to(device) for x in (q, k, v))
    out, meta = flex_flash_attn_func(q, k, v, slices=mask, backend=kernel, softcap=softcap)
    how = mask, 64**-0.5, softcap
    exact = dense_attention(q.double(), k.double(), v.double(), *how)
    same = dense_attention(q, k, v, *how)
    names = ("out", "lse")
    assert exact[1].isnan().any()
    # In fp32 an lse rounds at the size of the logits.
    scales = {"out": v.abs().max().item(), "lse": softcap if dtype == torch.float32 else 1.0}
    assert_as_good(
        {"out": out, "lse": meta.lse}, dict(zip(names, exact, strict=True)),
        dict(zip(names, same, strict=True)), dtype, scales,
    )  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_its_gradient_reaches_all_that_it_sees(name: str, kernel: str) -> None:
    """And, as 0 times infinity is nan, maybe neighbours; see docs/design/forward_kernel.md."""
    device, dtype = CASES[kernel]
    mask, row = MASKS[name], 90
    q, k, v, dout = random_qkv(mask, 2, 1, 64, dtype, 3)
    with torch.no_grad():
        k[..., 7] = k[..., 7].abs() + 1
        q[row, 1, 7] = -torch.inf
    q, k, v, dout = (x.detach().to(device).requires_grad_() for x in (q, k, v, dout))
    out, _ = flex_flash_attn_func(q, k, v, slices=mask, backend=kernel)
    dq, dk, dv = (g.cpu() for g in torch.autograd.grad(out, (q, k, v), dout))
    sees = torch.from_numpy(mask.to_dense())[row]
    assert dk.isnan().any(-1).any(-1)[sees].all()
    assert dv.isnan().any(-1).any(-1)[sees].all()
    assert dq[row, 1].isnan().any()


def test_a_later_stage_keeps_nan(kernel: str) -> None:
    """Also of rows that see nothing in it."""
    device, dtype = CASES[kernel]
    mask = MASKS["part"]
    q, k, v = (x.detach().to(device) for x in random_qkv(mask, 4, 2, 64, dtype, 3)[:3])
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.zeros(q.shape, dtype=acc, device=device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=acc, device=device)
    bad = [3, 90]  # the first sees nothing
    out[bad], lse[bad] = torch.nan, torch.nan
    table = SliceTable(mask.slices, len(q), len(k))
    backend = select_backend(kernel, q.device, dtype)
    out, lse = backend.forward(AttnCall(q, k, v, table, 0.125), prev=(out, lse))
    for x in (out.isnan().all(2).all(1), lse.isnan().all(1)):
        assert x.nonzero().flatten().tolist() == bad


REACH_Q, REACH_K = 192, 128
"""The largest tiles of the Hopper kernels: rows, keys."""


def spread(sees: torch.Tensor) -> torch.Tensor:
    """[T, T] bool: pairs that may share a tile with a visible cell."""
    for reach in (REACH_Q, REACH_K):  # along rows, then, transposed, along keys
        at = torch.arange(len(sees))
        before = torch.nn.functional.pad(sees.int().cumsum(0), (0, 0, 1, 0))
        ends = before[(at + reach).clamp(max=len(sees))] - before[(at - reach + 1).clamp(min=0)]
        sees = (ends > 0).T
    return sees


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_parts_of_a_long_walk_that_show_a_row_nothing() -> None:
    """Few rows with many keys are computed in parts: seeing nothing in one does not make nan."""
    from megatron_magi.core.kernel.hopper.choice import chosen_forward
    from megatron_magi.core.kernel.hopper.launch_values import HeadsKey

    num_k = 60_000
    mask = masks.from_ranges([[0, 60]], [[0, num_k]], [1], total_seqlen_q=64, total_seqlen_k=num_k)
    part = np.array([(0, 40, 0, num_k, -40, num_k), (40, 64, 30_000, 30_200, -64, num_k)], np.int32)
    for slices in (mask.slices, part):
        q, k, v = (torch.randn(n, 2, 64).to("cuda", torch.bfloat16) for n in (64, num_k, num_k))
        k[..., 7] = k[..., 7].abs() + 1
        q[[5, 50], 1, 7] = -torch.inf
        table = SliceTable(slices, 64, num_k)
        call = AttnCall(q, k, v, table, 0.125)
        assert chosen_forward(table, HeadsKey.of(call)).num_parts > 1
        out, lse = select_backend("cuda", q.device, q.dtype).forward(call)
        cells = AttnMask(slices, 64, num_k)
        want, want_lse = dense_attention(q.double(), k.double(), v.double(), cells, 0.125)
        assert torch.equal(out.isnan(), want.isnan()) and out.isnan().sum() == 2 * 64
        assert torch.equal(lse.isinf(), want_lse.isinf())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("poisoned", ["q", "k", "v", "dout"])
def test_nan_reaches_what_sees_it_and_no_further_than_a_tile(poisoned: str, head_dim: int) -> None:
    mask = masks.from_cu_seqlens([0, 300, 350, 900, 1700, 1712, 2400], causal=True)
    q, k, v, dout = random_qkv(mask, 4, 2, head_dim, torch.bfloat16, 3)
    tensors = {"q": q, "k": k, "v": v, "dout": dout}
    at = 880
    with torch.no_grad():
        tensors[poisoned][at] = torch.nan
    q, k, v, dout = (x.detach().cuda().requires_grad_() for x in (q, k, v, dout))
    out, meta = flex_flash_attn_func(q, k, v, slices=mask, backend="cuda")
    found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), strict=True))
    bad = {n: x.isnan().flatten(1).any(1).cpu() for n, x in {"out": out, **found}.items()}
    sees = torch.from_numpy(mask.to_dense())
    near, row = spread(sees), torch.zeros(len(sees), dtype=torch.bool)
    row[at] = True
    must_q, may_q = (sees[:, at], near[:, at]) if poisoned in "kv" else (row, row)
    if poisoned != "dout":
        assert bad["out"][must_q].all() and not bad["out"][~may_q].any()
    assert bad["dq"][must_q].all() and not bad["dq"][~may_q].any()
    for name in ("dk", "dv"):
        assert not bad[name][~near[may_q].any(0)].any()
    assert bad["dk"][sees[must_q].any(0)].all()
    assert not any(x.isinf().any() for x in (out, *found.values(), meta.lse))
