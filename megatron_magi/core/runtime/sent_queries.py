"""Queries that attend on the rank that has their keys, and what returns of them.

The forward sends queries and merges the (out, lse) that return. The backward sends them again with
dout, lse and delta, and adds the dq that returns; dk and dv are of rows that their rank owns. These
exchanges are all-to-alls of torch.distributed, independent of the transport of keys.

T local queries, N queries that arrive, S local keys, H query heads, G key/value heads, D head_dim
of queries and keys, E of values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_magi.core.comm.group_cast import group_cast
from megatron_magi.core.comm.group_reduce import PendingReduce, add_partials, group_reduce
from megatron_magi.core.comm.row_buffer import concat_buffer, split_columns
from megatron_magi.core.comm.transport import AllToAll
from megatron_magi.core.kernel.backend import AttnCall, GradCall, OutLse, Pair, acc_dtype
from megatron_magi.core.kernel.merge import merge_
from megatron_magi.core.runtime.prepared import PreparedQueries
from megatron_magi.core.runtime.stage_context import StageContext


class SentQueries:
    """A forward's queries: on their way, attending, and returning as (out, lse)."""

    def __init__(self, work: StageContext, stage: PreparedQueries, q: Tensor) -> None:
        """Start to send ``q`` [T, H, D]."""
        self.work, self.stage, self.q = work, stage, q
        self.transport = AllToAll(work.group)
        self.arriving = group_cast([q], stage.cast, self.transport)

    def attend(self, k: Tensor, v: Tensor) -> PendingReduce:
        """Attend on own keys [S, G, D] and values [S, G, E], and start to return the results."""
        (q,) = self.arriving.wait()
        work, dtype = self.work, acc_dtype(self.q.dtype)
        shapes = [torch.Size((q.shape[1], v.shape[2])), torch.Size((q.shape[1],))]
        results = concat_buffer(q, len(q), shapes, dtype)
        if self.stage.sees:
            numbers = work.softmax_scale, work.max_logits, work.softcap
            call = AttnCall(q, k, v, self.stage.table, *numbers)
            made = work.backend.forward(call, out_dtype=dtype)
            _copy(made, split_columns(results, shapes))
        return group_reduce(results, shapes, self.stage.cast, self.transport)

    def merge(self, returning: PendingReduce, so_far: OutLse) -> None:
        """Merge what returns into ``so_far``, in place and in the order of ranks."""
        parts = returning.wait()
        rows = self.stage.cast.send.here()
        for peer in self.stage.cast.peers:
            index = rows[peer]
            out, lse = (x.index_select(0, index) for x in so_far)
            merge_(out, lse, *(x[peer] for x in parts))
            for target, merged in zip(so_far, (out, lse), strict=True):
                target.index_copy_(0, index.long(), merged)


class SentGradients:
    """A backward's queries and the gradients of their outputs: on their way, and their dq."""

    def __init__(self, work: StageContext, stage: PreparedQueries, grad: Sequence[Tensor]) -> None:
        """Start to send.

        Args:
            grad: q [T, H, D], dout [T, H, E], and lse and delta [T, H] in the accumulation dtype.
        """
        self.work, self.stage = work, stage
        self.transport = AllToAll(work.group)
        q, dout, lse, delta = grad
        self.arriving = group_cast([q, dout.to(q.dtype)], stage.cast, self.transport)
        # Side by side with q, rows of lse and delta would break the kernels' alignment.
        self.sums = group_cast([lse, delta], stage.cast, self.transport)

    def attend(self, k: Tensor, v: Tensor, own: Pair) -> PendingReduce:
        """Compute gradients, add those of own keys and values to ``own``, and start to return dq.

        Args:
            own: dk [S, G, D] and dv [S, G, E], added to in place.
        """
        q, dout = self.arriving.wait()
        # Always copied for alignment; .contiguous() would not copy a single row.
        lse, delta = (x.clone(memory_format=torch.contiguous_format) for x in self.sums.wait())
        work, dtype = self.work, acc_dtype(q.dtype)
        results = concat_buffer(q, len(q), [q.shape[1:]], dtype)
        if self.stage.sees:
            asked = AttnCall(q, k, v, self.stage.table, work.softmax_scale, None, work.softcap)
            deterministic = work.plan.config.deterministic
            grad = GradCall(dout, lse, delta, dtype=dtype, deterministic=deterministic)
            dq, *of_keys = work.backend.backward(asked, grad)
            _copy([dq], split_columns(results, [q.shape[1:]]))
            for total, part in zip(own, of_keys, strict=True):
                total.add_(part)
        return group_reduce(results, [q.shape[1:]], self.stage.cast, self.transport)


def add_returned(dq: Tensor, returning: PendingReduce, dtype: torch.dtype) -> Tensor:
    """dq [T, H, D] and what returns for its rows, in ``dtype``."""
    (total,) = add_partials([dq], [returning], dtype)
    return total


def _copy(made: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for target, x in zip(into, made, strict=True):
        target.copy_(x)
