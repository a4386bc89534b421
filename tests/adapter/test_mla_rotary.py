"""Rotary embeddings of MLA layers: stock angles, at the rows' positions."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megatron_magi.adapter import mla, rope
from megatron_magi.adapter.packed import MagiPackedSeqParams

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
    with pytest.raises(NotImplementedError, match="rope_type 'rope' or 'yarn', got Identity"):
        mla.rotary_by_row(torch.nn.Identity())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [{}, {"mscale": 1.0}], ids=["YaRN's scale", "a given scale"])
def test_fused_kernels_read_tables_of_the_positions(
    dtype: torch.dtype, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    stock = STOCK["yarn"]()
    if given and "mscale" not in inspect.signature(stock.get_cached_cos_sin).parameters:
        pytest.skip("this Megatron's scale is always YaRN's")
    ours = mla.rotary_by_row(stock)
    wanted = stock.get_cached_cos_sin(100, dtype=dtype, packed_seq=False, **given)
    ours.positions = torch.tensor([3, 99, 0, 3, 41])
    tables = ours.get_cached_cos_sin(100, dtype=dtype, packed_seq=False, **given)
    for table, whole in zip(tables, wanted, strict=True):
        assert table.dtype == dtype and torch.equal(table, whole[ours.positions])
    ours.positions = None
    stocks = ours.get_cached_cos_sin(100, dtype=dtype, packed_seq=False, **given)
    assert all(map(torch.equal, stocks, wanted))


@pytest.mark.parametrize("length", [16, 100])
def test_fused_kernels_read_the_mirrored_pieces_of_plain_batches(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs that hold attention under context parallelism have such batches, and the table that
    the stock module keeps is whole, and may be of another length."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    stock = STOCK["yarn"]()
    pieces = [*range(length // 4, length // 2), *range(length // 2, 3 * length // 4)]
    monkeypatch.setattr(
        yarn_rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", lambda x, *_: x[pieces]
    )
    wanted = [table[pieces].clone() for table in stock.get_cached_cos_sin(length)]
    stock.cp_group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    tables = mla.rotary_by_row(stock).get_cached_cos_sin(length, packed_seq=False)
    assert all(map(torch.equal, tables, wanted))


@pytest.mark.parametrize("kind", STOCK)
def test_a_models_embedding_follows_its_microbatch(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    stock = STOCK[kind]()
    ours = rope.rotary_of_rows(stock)
    assert rope.rotary_of_rows(ours) is ours and isinstance(ours, type(stock))
    wanted, scale = parts(stock(100))
    packed = MagiPackedSeqParams(
        rope_positions=torch.tensor([7, 0, 99, 7]), max_seqlen_q=100, max_seqlen_kv=100
    )
    config = SimpleNamespace(sequence_parallel=False, context_parallel_size=2)
    rows = torch.zeros(50, 1, 8)
    for given, positions in ((packed, packed.rope_positions), (None, torch.arange(100))):
        length = ours.get_rotary_seq_len(None, None, rows, config, given)
        angles, our_scale = parts(ours(length, packed_seq=False))
        assert torch.equal(angles, wanted[positions]) and our_scale == scale
