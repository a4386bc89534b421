"""The reference kernel beside its results: memory, dtypes, what it is chosen for."""

from __future__ import annotations

import pytest
import torch

import megatron_magi as magi
from megatron_magi import masks
from megatron_magi.core.kernel.attention import flex_flash_attn_func
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.reference import ReferenceBackend, _tiles
from megatron_magi.core.kernel.slice_table import SliceTable
from tests.dense import random_qkv

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", [1, 8, 128, 2**14])
def test_a_tile_has_at_most_four_million_scores(heads: int) -> None:
    table = SliceTable(masks.full(6000).slices, 6000, 6000)
    sizes = {
        (rows.stop - rows.start, keys.stop - keys.start)
        for rows, keys, _ in (next(iter(_tiles(table, heads, CPU))),)
    }
    ((rows, keys),) = sizes
    assert 0.8 * 2**22 < rows * keys * heads <= 2**22


def test_a_tile_of_many_heads_has_16_rows() -> None:
    table = SliceTable(masks.full(64).slices, 64, 64)
    rows, keys, _ = next(iter(_tiles(table, 2**20, CPU)))
    assert (rows.stop, keys.stop) == (16, 16)


@pytest.mark.parametrize("asked", [None, torch.float32, torch.float64, torch.bfloat16])
def test_gradients_have_the_dtype_that_is_asked_for(asked: torch.dtype | None) -> None:
    mask = masks.causal(12)
    table = SliceTable(mask.slices, 12, 12)
    q, k, v, dout = (x.detach() for x in random_qkv(mask, 4, 2, 8, torch.bfloat16, 3))
    kernel = ReferenceBackend()
    out, lse = kernel.forward(AttnCall(q, k, v, table, 0.3))
    grads = kernel.backward(
        AttnCall(q, k, v, table, 0.3), GradCall(dout, lse, out=out, dtype=asked)
    )
    assert [g.dtype for g in grads] == [asked or torch.float32] * 3


def test_delta_is_a_row_sum() -> None:
    out, dout = torch.randn(2, 3, 4, 5).unbind(0)
    got = ReferenceBackend().delta(out, dout, torch.float32)
    torch.testing.assert_close(got, (out * dout).sum(-1))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backend_is_told_whether_bits_must_be_equal(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a call on one device and by a plan; the fast mode is the default of both."""
    asked = []
    plain = ReferenceBackend.backward

    def backward(self: ReferenceBackend, call: AttnCall, grad: GradCall) -> object:
        asked.append(grad.deterministic)
        assert grad.out is not None, "without a gradient of lse the kernel makes delta"
        return plain(self, call, grad)

    monkeypatch.setattr(ReferenceBackend, "backward", backward)
    q, k, v, _ = random_qkv(masks.causal(12), 4, 2, 8, torch.float32, 3)
    given = {"deterministic": True} if deterministic else {}
    flex_flash_attn_func(q, k, v, slices=masks.causal(12), **given)[0].sum().backward()
    plan = magi.plan(masks.causal(12), 1, magi.HeadShape(4, 2, 8), magi.MagiConfig(**given))
    magi.dist_attn(q, k, v, plan, None)[0].sum().backward()
    assert asked == [deterministic] * 2
