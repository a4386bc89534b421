"""One microbatch as layers with state read it: whole documents in the order of the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.core.cuda.tables import upload

_VIEW = "_magi_stream_view"

ROWS = "_magi_stream_rows"
"""Attribute of the cu_seqlens of a `StreamParams`, by which the delta net's exchange knows it."""


@dataclass(frozen=True, eq=False)
class StreamRows:
    """Two orders of all rows of a microbatch, padding included, on one device."""

    stream_order: Tensor
    """int64 [padded_seqlen]: for every row of the stream, its place in the ranks' order."""

    rank_order: Tensor
    """int64 [padded_seqlen]: for every place in the ranks' order, its row of the stream."""

    def to_stream(self, x: Tensor) -> Tensor:
        """Rows in the ranks' order -> rows in the stream's order, along dimension 0.

        Raises:
            ValueError: another number of rows than the layout's.
        """
        return self._reordered(x, self.stream_order, self.rank_order)

    def to_ranks(self, x: Tensor) -> Tensor:
        """Inverse of `to_stream`."""
        return self._reordered(x, self.rank_order, self.stream_order)

    def _reordered(self, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        if len(x) != len(order):
            raise ValueError(
                f"a layer with state requires all {len(order)} rows of the plan's layout, got "
                f"{len(x)}; dispatch the batch by the same plan"
            )
        return _Reorder.apply(x, order, inverse)


@dataclass
class StreamParams(PackedSeqParams):  # type: ignore[misc]
    """The stock packed format ('thd') of the stream, with the order of magi's layout.

    Padding is a document of its own, which comes last; documents without a row are left out.
    """

    rows: Any = None
    """`StreamRows`."""


def stream_view(packed: MagiPackedSeqParams) -> StreamParams:
    """The stream of a microbatch; it is built once and kept with its parameters.

    Raises:
        NotImplementedError: a tree, whose branches a layer would read as one sequence.

    Cost: the first call uploads 20 bytes a row.
    """
    if packed.has_branches:
        raise NotImplementedError(
            "layers with state require sequences without branches, got a PrefixTree; pack every "
            "branch as a document of its own"
        )
    view: StreamParams | None = getattr(packed, _VIEW, None)
    if view is None:
        with torch.inference_mode(False):  # so that later calls may save it for their backward
            view = _make(packed)
        setattr(packed, _VIEW, view)
    return view


def _make(packed: MagiPackedSeqParams) -> StreamParams:
    assert packed.document_bounds is not None and packed.rope_positions is not None, "assembled"
    layout, device = packed.token_plan.layout, packed.rope_positions.device
    bounds = np.unique(np.append(packed.document_bounds, layout.padded_seqlen)).astype(np.int32)
    lengths = np.diff(bounds)
    seq_idx = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    cu_seqlens = upload(torch.from_numpy(bounds), device)
    rows = _rows(layout.permutation(), device)
    setattr(cu_seqlens, ROWS, rows)
    longest = int(lengths.max())
    return StreamParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cp_group=packed.cp_group,
        seq_idx=upload(torch.from_numpy(seq_idx[None]), device),
        rows=rows,
    )


def _rows(rank_order: npt.NDArray[np.int64], device: torch.device) -> StreamRows:
    stream_order = np.empty_like(rank_order)
    stream_order[rank_order] = np.arange(len(rank_order))
    both = (upload(torch.from_numpy(order), device) for order in (stream_order, rank_order))
    return StreamRows(*both)


class _Reorder(torch.autograd.Function):
    """index_select by a permutation, whose gradient is another one and adds nothing up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.inverse), None, None
