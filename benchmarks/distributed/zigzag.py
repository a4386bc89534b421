"""All-gather on the usual balanced layouts, as Megatron and TransformerEngine have them, on our
kernel or FlashAttention-3.

T rows of this rank (padding included), S of the sequence, H query heads, G key/value heads,
D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.distributed.calls import Grads, Problem, gather, scatter
from megatron_magi import AttnMask
from megatron_magi.core.kernel.backend import AttnCall, GradCall, OutLse
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.native import solver
from megatron_magi.viz.document_zigzag import DocumentZigzag
from megatron_magi.viz.plan_facts import PER_DOCUMENT, PER_SEQUENCE, zigzag_layout

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ZigzagLayout:
    """Which rows of the sequence each rank has."""

    name: str
    """One of the names in megatron_magi/viz/plan_facts.py."""
    num_rows: int
    """Of the sequence."""
    rows: tuple[Int64Array, ...]
    """int64 [T] of every rank: the sequence's row of every local row, -1 for padding."""

    @classmethod
    def of(cls, mask: AttnMask, ranks: int) -> ZigzagLayout:
        """Per document where the mask is packed documents, else per sequence."""
        total = mask.total_seqlen_q
        documents = DocumentZigzag.of(mask, ranks)
        if documents is not None:
            return cls(PER_DOCUMENT, total, tuple(documents.rows(r) for r in range(ranks)))
        layout = zigzag_layout(total, ranks)
        rows = [layout.position_ids(rank) for rank in range(ranks)]
        return cls(PER_SEQUENCE, total, tuple(np.where(r < total, r, -1) for r in rows))

    @property
    def padding_tokens(self) -> int:
        return sum(map(len, self.rows)) - self.num_rows

    def natural_order(self) -> Int64Array:
        """int64 [ranks * T]: where each row of the sequence lies among the gathered rows; where
        the padding lies comes behind."""
        rows = np.concatenate(self.rows)
        return np.argsort(np.where(rows < 0, self.num_rows, rows), kind="stable")

    def local(self, x: Tensor, rank: int) -> Tensor:
        """[T, ...]: the rank's rows of [S, ...]; padding is 0."""
        rows = torch.from_numpy(self.rows[rank]).to(x.device)
        local = x.new_zeros(len(rows), *x.shape[1:])
        local[rows >= 0] = x[rows[rows >= 0]]
        return local

    def runs(self, rank: int) -> list[tuple[int, int, int]]:
        """(local row, row of the sequence, length) of every run of following rows; no padding."""
        rows = self.rows[rank]
        edges = np.flatnonzero(np.diff(rows, prepend=-9, append=-9) != 1)
        return [(int(a), int(rows[a]), int(b - a)) for a, b in pairwise(edges) if rows[a] >= 0]

    def local_slices(self, mask: AttnMask, rank: int) -> npt.NDArray[np.int32]:
        """The mask of the rank's rows over all keys in natural order."""
        pieces = [np.zeros((0, 6), np.int32)]
        for local, start, length in self.runs(rank):
            cut = solver.cut_slices(mask.slices, start, start + length, 0, mask.total_seqlen_k)
            pieces.append(cut + np.array([1, 1, 0, 0, -1, -1], np.int32) * (local - start))
        return np.concatenate(pieces)


class AllGatherZigzag:
    """All keys and values to every rank, put into natural order by an index, a kernel on the
    rank's rows; gradients by the inverse index and reduce-scatter in the dtype of q. Keys are
    gathered again in backward, as in ours."""

    def __init__(self, x: Problem) -> None:
        rank = dist.get_rank()
        self.layout = ZigzagLayout.of(x.mask, dist.get_world_size())
        parts = (self.layout.local(t, rank) for t in (x.q, x.k, x.v, x.dout))
        self.q, self.k, self.v, self.dout = parts
        order = torch.from_numpy(self.layout.natural_order())
        self.order = order.to(x.q.device)
        self.inverse = torch.argsort(order).to(x.q.device)
        self.table = SliceTable(self.layout.local_slices(x.mask, rank), len(self.q), len(order))
        self.kernel, self.scale = x.kernel(), x.scale
        self.out, self.lse = self.forward()

    def _keys(self) -> tuple[Tensor, Tensor]:
        return gather(self.k).index_select(0, self.order), gather(self.v).index_select(
            0, self.order
        )

    def forward(self) -> OutLse:
        return self.kernel.forward(AttnCall(self.q, *self._keys(), self.table, self.scale))

    def backward(self) -> Grads:
        call = AttnCall(self.q, *self._keys(), self.table, self.scale)
        grad = GradCall(self.dout, self.lse, out=self.out, dtype=self.q.dtype)
        dq, dk, dv = self.kernel.backward(call, grad)
        dk, dv = (scatter(t.index_select(0, self.inverse)) for t in (dk, dv))
        return dq, dk, dv

    def full(self) -> tuple[Tensor, ...]:
        real = self.order[: self.layout.num_rows]
        return tuple(gather(t).index_select(0, real) for t in (self.out, *self.backward()))
