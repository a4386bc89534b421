"""Rotary embeddings of MLA layers: stock angles, at the rows' positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megatron_magi.adapter import mla

YARN = {
    "scaling_factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
STOCK = {
    "rope": lambda: RotaryEmbedding(16, rotary_percent=1.0, use_cpu_initialization=True),
    "yarn": lambda: YarnRotaryEmbedding(16, use_cpu_initialization=True, **YARN),
}


def parts(angles: Any) -> tuple[torch.Tensor, float]:
    return angles if isinstance(angles, tuple) else (angles, 1.0)


@pytest.mark.parametrize("kind", STOCK)
def test_angles_are_stock_ones_of_the_positions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    stock = STOCK[kind]()
    ours = mla.rotary_by_row(stock)
    assert mla.rotary_by_row(ours) is ours and isinstance(ours, type(stock))
    wanted, scale = parts(stock(100))
    assert all(map(torch.equal, parts(ours(100))[:1], (wanted,))), "no positions: the stock module"
    ours.positions = torch.tensor([3, 99, 0, 3, 41])
    angles, our_scale = parts(ours(100, packed_seq=False))
    assert torch.equal(angles, wanted[ours.positions]) and our_scale == scale
    assert (kind == "yarn") == (scale != 1.0)


def test_other_rotary_embeddings_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="rope_type 'rope' or 'yarn', got a Identity"):
        mla.rotary_by_row(torch.nn.Identity())
