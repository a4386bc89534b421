"""Masks as FlashAttention-4 takes them."""

from __future__ import annotations

import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel.slice_table import SliceTable
from tests.core.kernel import flash4_on_cpu
from tests.core.kernel.test_torch_flex import comb


def test_blocks_that_nobody_sees_are_not_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    flash4_on_cpu.install(monkeypatch)
    from megatron_magi.core.kernel.flash4_mask import flash4_mask

    made = flash4_mask(SliceTable.of(masks.causal(1024)), torch.device("cpu"), 1)
    partial, _, full, _ = (x[0, 0].tolist() for x in made.forward[:4])
    assert partial == [2, 2, 2, 2] and full == [0, 2, 4, 6]
    assert made.backward[0][0, 0].tolist() == [1] * 8
    assert made.backward[2][0, 0].tolist() == [3, 3, 2, 2, 1, 1, 0, 0]
    assert made.intervals[0].shape == (1, 1024)
    assert all(x.is_contiguous() for x in (*made.forward[:4], *made.backward[:4]))
    assert flash4_mask(SliceTable(comb(33).slices, 150, 104), torch.device("cpu"), 1).intervals[
        0
    ].shape == (64, 256)
