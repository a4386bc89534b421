"""The stream as layers with state read it, and the checks in front of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig

from megatron_magi import PrefixTree
from megatron_magi.adapter import state_layers
from megatron_magi.adapter.document_plans import document_plans
from megatron_magi.adapter.packed import MagiPackedSeqParams, make_packed_seq_params
from megatron_magi.adapter.stream_view import ROWS, stream_view
from megatron_magi.config import CostTable, MagiConfig

CONFIG = MagiConfig(chunk_size=3, costs=CostTable(tile_q=4, tile_k=4))
"""Chunks so small that ranks own them in turns."""


def packed_of(bounds: list[int], cp_size: int, **config: Any) -> MagiPackedSeqParams:
    settings = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, **config)
    host = np.array(bounds, dtype=np.int64)
    plan, _ = document_plans(host, settings, cp_size, CONFIG)
    return MagiPackedSeqParams(
        qkv_format="sbhd", plan=plan, document_bounds=host, rope_positions=torch.zeros(1)
    )


class Layer:
    """What the checks read of a layer with state."""

    def __init__(self, cp: int = 2, tp: int = 1, sp: bool = False) -> None:
        sizes = {name: SimpleNamespace(size=lambda n=n: n) for name, n in (("cp", cp), ("tp", tp))}
        self.pg_collection = SimpleNamespace(**sizes)
        self.config = SimpleNamespace(sequence_parallel=sp)


def give(layer: Any, rows: torch.Tensor, packed: Any) -> Any:
    _, kwargs = state_layers._give_stream(layer, (rows,), {"packed_seq_params": packed})
    return kwargs["packed_seq_params"]


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("bounds", [[0, 96], [0, 5, 5, 40, 95, 95], [0, 0, 7, 7, 7, 96, 96]])
def test_documents_and_padding_are_apart_and_none_is_empty(bounds: list[int], cp_size: int) -> None:
    packed = packed_of(bounds, cp_size)
    view, padded = stream_view(packed), packed.token_plan.layout.padded_seqlen
    assert view.cu_seqlens_q is view.cu_seqlens_kv and view.cu_seqlens_q.dtype == torch.int32
    cu_seqlens = view.cu_seqlens_q.tolist()
    assert cu_seqlens == sorted({*bounds, padded}) and view.qkv_format == "thd"
    assert view.seq_idx.shape == (1, padded) and view.seq_idx.dtype == torch.int32
    counts = view.seq_idx[0].bincount().tolist()
    assert counts == np.diff(cu_seqlens).tolist() and min(counts) > 0
    assert view.max_seqlen_q == view.max_seqlen_kv == max(counts)
    assert (view.seq_idx[0].diff() >= 0).all()
    assert stream_view(packed) is view and getattr(view.cu_seqlens_q, ROWS) is view.rows


def test_orders_are_those_of_the_layout() -> None:
    packed = packed_of([0, 96], 2)
    rows, layout = stream_view(packed).rows, packed.token_plan.layout
    stream = torch.arange(96, dtype=torch.float64)[:, None]
    by_rank = torch.cat([stream[layout.position_ids(rank)] for rank in range(2)])
    assert not torch.equal(by_rank, stream), "this layout changes the order"
    assert torch.equal(rows.to_stream(by_rank), stream)
    assert torch.equal(rows.to_ranks(stream), by_rank)
    x = torch.randn(96, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rows.to_stream, x)
    assert torch.autograd.gradcheck(rows.to_ranks, x)
    with pytest.raises(ValueError, match="requires all 96 rows of the plan's layout, got 95"):
        rows.to_stream(stream[:95])


def test_a_layer_gets_the_stream_for_rows_of_the_plan() -> None:
    packed = packed_of([0, 30, 96], 2)
    assert give(Layer(), torch.zeros(48, 1, 4), packed) is stream_view(packed)
    assert give(Layer(tp=2, sp=True), torch.zeros(24, 1, 4), packed) is stream_view(packed)
    assert give(Layer(tp=2), torch.zeros(48, 1, 4), packed) is stream_view(packed)
    assert give(Layer(cp=1), torch.zeros(48, 2, 4), None) is None, "plain sequences on one rank"


@pytest.mark.parametrize(
    "layer, shape, text",
    [
        (Layer(), (47, 1, 4), "48 x batch 1 on each of 2 ranks, got 47 x batch 1 on 2; dispatch"),
        (Layer(), (24, 2, 4), "got 24 x batch 2 on 2"),
        (Layer(cp=4), (48, 1, 4), "got 48 x batch 1 on 4"),
        (Layer(tp=2, sp=True), (48, 1, 4), "got 96 x batch 1 on 2"),
    ],
)
def test_rows_of_another_layout_are_refused(layer: Any, shape: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        give(layer, torch.zeros(shape), packed_of([0, 30, 96], 2))


@pytest.mark.parametrize(
    "cp_size, packed, text",
    [
        (2, None, "requires MagiPackedSeqParams .* got NoneType with context_parallel_size=2"),
        (1, PackedSeqParams(qkv_format="thd"), "got PackedSeqParams with context_parallel_size=1"),
    ],
)
def test_rows_without_a_plan_are_refused(cp_size: int, packed: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        give(Layer(cp=cp_size), torch.zeros(48, 1, 4), packed)


def test_plain_rows_stay_where_a_graph_holds_the_layer() -> None:
    """Megatron's two mirrored pieces of each sequence, which the layer itself puts in order."""
    layer = Layer(cp=2)
    layer.config.cuda_graph_impl = "local"
    assert give(layer, torch.zeros(48, 1, 4), None) is None
    with pytest.raises(ValueError, match="got PackedSeqParams with context_parallel_size=2"):
        give(layer, torch.zeros(48, 1, 4), PackedSeqParams(qkv_format="thd"))


def test_a_layer_that_was_added_after_attach_is_refused() -> None:
    packed = packed_of([0, 96], 1)
    undo = state_layers._reordered(
        lambda input_, cp_size, packed_seq_params=None: input_, state_layers.StreamRows.to_stream
    )
    with pytest.raises(RuntimeError, match="must be attached"):
        undo(torch.zeros(96, 1), 2, packed)
    assert undo(torch.zeros(3, 1), 2).shape == (3, 1), "stock calls stay stock"


def test_a_tree_has_no_stream() -> None:
    """A state would run from one branch into the next."""
    settings = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    tree = PrefixTree.of_answers(4, [3, 5])
    packed = make_packed_seq_params([0, 12], settings, None, mask=tree, device="cpu")
    with pytest.raises(NotImplementedError, match="require sequences without branches, got a"):
        give(Layer(cp=1), torch.zeros(12, 1, 64), packed)
