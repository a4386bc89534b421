"""The backward in stages: each adds to dq, and returns the gradients of its keys and values to the
ranks that own the rows while the next one computes.

T local tokens, H query heads, G key/value heads, D head_dim of queries and keys, E of values.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from megatron_magi.core.comm.group_reduce import PendingPartials, add_partials
from megatron_magi.core.comm.hierarchical import reduce_rows
from megatron_magi.core.comm.prepared_cast import PreparedCast
from megatron_magi.core.comm.row_buffer import concat_buffer, split_columns
from megatron_magi.core.comm.rows import head_start
from megatron_magi.core.comm.transport_choice import transport_of_reduces
from megatron_magi.core.cuda.side_stream import side_stream
from megatron_magi.core.kernel.backend import AttnCall, GradCall, Gradients, Pair, acc_dtype
from megatron_magi.core.kernel.head_dims import COMPILED_WIDTHS, widths_of
from megatron_magi.core.runtime.prepared import PreparedStage
from megatron_magi.core.runtime.saved_kv import SavedKV
from megatron_magi.core.runtime.sent_queries import SentGradients, add_returned
from megatron_magi.core.runtime.stage_context import KVPrefetcher, OutGrads, Qkv, StageContext


def staged_backward(
    work: StageContext, qkv: Qkv, result: Pair, of_out: OutGrads, kept: SavedKV | None
) -> Gradients:
    """dq [T, H, D], dk [T, G, D] and dv [T, G, E], in the dtypes of q, k and v.

    Args:
        result: out and lse of the forward.
        of_out: see OutGrads.
        kept: the keys and values that the forward received; None: they are fetched again.
    """
    q, k, v = qkv
    *remote, own = work.ready.backward
    side = side_stream(q.device) if _may_run_concurrently(work, q, v) else None
    feed = KVPrefetcher(work, remote if side else work.ready.backward, k, v, kept)
    feed.keepalive = feed.in_flight if side else None
    if feed.in_flight is not None and work.transport.uses_sms:
        head_start(q.device)
    walk = _Backward(work, qkv, result, of_out)
    feed.on_fetch = walk.send
    try:
        with side.current() if side else nullcontext():
            for stage, keys, values in feed:
                walk.run(stage, keys, values)
                del keys, values
            walk.send()
        if side:
            walk.run(own, k, v)
    finally:  # also after an error, which frees tensors that the side stream may still use
        if side:
            side.join()
    return walk.sums()


class _Backward:
    """State of a backward: shared inputs, and the sums that stages add to."""

    def __init__(self, work: StageContext, qkv: Qkv, result: Pair, of_out: OutGrads) -> None:
        """Arguments as of ``staged_backward``."""
        (q, k, v), (out, self.lse), (self.dout, self.delta) = qkv, result, of_out
        self.work, self.q, self.k, self.v = work, q, k, v
        alone = work.ready.is_alone
        # A single kernel call computes delta itself.
        self.out = out if alone and self.delta is None else None
        if self.out is None and self.delta is None:
            self.delta = work.backend.delta(out, self.dout, self.lse.dtype)
        dtype = q.dtype if alone else acc_dtype(q.dtype)
        self.dq = None if alone else q.new_zeros(q.shape, dtype=dtype)
        self.key_grads = KeyGradients(work, k, v, dtype)
        self.unsent: PreparedStage | None = None
        """The stage whose gradients of keys and values are computed, but not on their way."""
        self.queries: SentGradients | None = None
        if work.ready.queries is not None:
            assert self.delta is not None, "delta is known where a rank is not alone"
            sent = q, self.dout, self.lse, self.delta
            self.queries = SentGradients(work, work.ready.queries, sent)

    def run(self, stage: PreparedStage, keys: Tensor, values: Tensor) -> None:
        """Add a stage's part of dq, and compute the gradients of its keys and values.

        ``send`` returns those when the next fetch, whose keys are needed first, has begun. If the
        transport cannot delay a send, it returns them at once.
        """
        grads = self.key_grads.place(stage)
        work = self.work
        if stage.sees:
            numbers = work.softmax_scale, None, work.softcap
            asked = AttnCall(self.q, keys, values, stage.table, *numbers)
            grad = GradCall(
                self.dout, self.lse, self.delta, self.out, grads[0].dtype, self.dq, grads,
                work.plan.config.deterministic,
            )  # fmt: skip
            self.dq, *_ = work.backend.backward(asked, grad)
        else:
            for x in grads:
                x.zero_()
        self.unsent = stage
        if not work.transport.can_delay_send:
            self.send()

    def send(self) -> None:
        """Return the gradients that ``run`` has computed, if they have not left."""
        stage, self.unsent = self.unsent, None
        if stage is not None:
            self.key_grads.send(stage)

    def sums(self) -> Gradients:
        """All gradients, in the dtypes of q, k and v, when every stage has run."""
        if self.queries is None:
            dq = torch.zeros_like(self.q) if self.dq is None else self.dq.to(self.q.dtype)
            return dq, *self.key_grads.sums()
        assert self.dq is not None and self.key_grads.mine is not None
        returning = self.queries.attend(self.k, self.v, self.key_grads.mine)
        dk, dv = self.key_grads.sums()
        return add_returned(self.dq, returning, self.q.dtype), dk, dv


MAX_CONCURRENT_HEAD_BYTES = 12 << 20
"""Bytes of one query head's q, dout and dq (2 + 2 + 4 an element) above which stages run one after
another: 12,288 rows at head_dim 128. With more, blocks of the two kernels drift apart and share
less of the L2. On one H100 without exchanges, head_dim 128, concurrent stages took 0.96 to 1.06
times as long as one after another at 8K rows on the slowest of four ranks, 1.00 to 1.22 times at
16K and 1.05 to 1.34 at 32K (record rank_times_h100_2026-11-27)."""


def _may_run_concurrently(work: StageContext, q: Tensor, v: Tensor) -> bool:
    """True if the stages on received keys may run concurrently with the one on own keys.

    They have priority, and the stage on own keys fills the SMs that they leave idle: between two
    kernels, and until rows arrive. Both kernels add to dq at the same time, in an order that
    differs from run to run. A transport that takes SMs would wait behind all blocks of the stage on
    own keys, from its second exchange on.
    """
    *remote, own = work.ready.backward
    if work.transport.uses_sms or 8 * q.shape[0] * q.shape[2] > MAX_CONCURRENT_HEAD_BYTES:
        return False
    together = q.is_cuda and not work.plan.config.deterministic
    # Heads of other widths are padded, and their dq is added in another way.
    together = together and work.backend.adds_atomically and widths_of(q, v) in COMPILED_WIDTHS
    casts = [stage.cast for stage in remote]
    plain = bool(casts) and own.cast is None and own.sees
    return together and plain and all(isinstance(cast, PreparedCast) for cast in casts)


class KeyGradients:
    """Returns the gradients of a stage's keys and values to the ranks that own the rows."""

    def __init__(self, work: StageContext, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        """``dtype`` is that of the sums of this rank's rows until ``sums`` returns them."""
        self.work, self.k, self.v, self.dtype = work, k, v, dtype
        casts = [] if work.keeps else [x.cast for x in work.ready.backward if x.cast is not None]
        self.transport = transport_of_reduces(work.transport, work.plan, k, len(casts))
        self.shapes = k.shape[1:], v.shape[1:]
        self.place_of: Tensor | None = None
        self.mine: Pair | None = None  # gradients of this rank's rows, all from one stage
        self.pending: list[PendingPartials] = []

    def place(self, stage: PreparedStage) -> Pair:
        """Where the stage writes dk and dv, [num_keys, G, D or E]; sent rows lie side by side.

        It also keeps the buffer for ``send``, and own rows for ``sums``.
        """
        own = stage.num_own
        if stage.cast is None:
            of_k, of_v = self.shapes
            dk = self.k.new_empty((own, *of_k), dtype=self.dtype)
            dv = self.k.new_empty((own, *of_v), dtype=self.dtype)
        else:
            dtype = self.dtype if own else self.work.wire_dtype
            is_sent = dtype == self.work.wire_dtype  # as it is, not rounded first
            room = self.transport.room if is_sent else concat_buffer
            self.place_of = room(self.k, stage.table.num_k, self.shapes, dtype)
            dk, dv = split_columns(self.place_of, self.shapes)
        if own:
            self.mine = (dk, dv) if own == stage.table.num_k else (dk[:own], dv[:own])
        return dk, dv

    def send(self, stage: PreparedStage) -> None:
        """Start to send the gradients, once the stage has written them where ``place`` said."""
        if stage.cast is not None:
            assert self.place_of is not None
            own, wire = stage.num_own, self.work.wire_dtype
            partials = self.place_of[own:] if own else self.place_of
            if partials.dtype != wire:
                rounded = self.transport.room(self.k, len(partials), self.shapes, wire)
                partials = rounded.copy_(partials)
                own = 0
            returning = partials, self.shapes, stage.cast, self.transport
            self.pending.append(reduce_rows(*returning, acc_dtype(self.k.dtype), own))

    def sums(self) -> Pair:
        """Wait for all partial gradients; dk and dv of this rank's rows, in the dtype of k."""
        if self.mine is None:
            self.mine = self.k.to(self.dtype), self.v.to(self.dtype)  # no rows at all
        dk, dv = add_partials(self.mine, self.pending, self.k.dtype)
        return dk, dv
