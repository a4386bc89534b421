"""The backward in one kernel call, while rows arrive and gradients leave.

The kernel waits for a word on the device before it reads keys that another rank sends, and raises
another one when their gradients are written, so that these return to their owners while it works on
the last own keys. dq is added up once, and no key is copied. Copy engines
move the rows: a kernel that waits holds SMs, which an exchange by another kernel might need.

T local tokens, S received rows, G key/value heads, D head_dim of queries and keys, E of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.core.comm.copy_engine import CopyEngine
from megatron_magi.core.comm.group_cast import group_cast
from megatron_magi.core.comm.group_reduce import PendingReduce, add_partials
from megatron_magi.core.comm.prepared_cast import PreparedCast
from megatron_magi.core.comm.row_buffer import rows_beside, split_columns
from megatron_magi.core.kernel.backend import (
    Arrival,
    AttnCall,
    GradCall,
    Pair,
    Received,
    acc_dtype,
)
from megatron_magi.core.kernel.widths import widths_of
from megatron_magi.core.runtime.kept_keys import KeptKeys
from megatron_magi.core.runtime.stage_work import Gradients, Inputs, OutGrads, StageWork


def may_join(work: StageWork, q: Tensor, v: Tensor) -> bool:
    """Whether one kernel call may compute all gradients of this rank's queries."""
    moves_beside = isinstance(work.transport, CopyEngine)
    has_stage = work.ready.joined is not None
    return moves_beside and has_stage and work.backend.takes_received(widths_of(q, v))


def joined_backward(
    work: StageWork, qkv: Inputs, result: Pair, gradients: OutGrads, kept: KeptKeys | None
) -> Gradients:
    """As ``staged_backward``, in one kernel call; see ``may_join``."""
    walk = _Joined(work, qkv[1], qkv[2], kept)
    call, grad = walk.asked(qkv, result, gradients)
    dq, *_ = work.backend.backward(call, grad)
    count = work.backend.done_count(call, grad.deterministic)
    return dq.to(qkv[0].dtype), *walk.sums(count)


class _Joined:
    """The rows that arrive and leave during one kernel call."""

    def __init__(self, work: StageWork, k: Tensor, v: Tensor, kept: KeptKeys | None) -> None:
        """Begin to fetch keys and values if none are kept, and create what the kernel writes to."""
        engine, stage = work.transport, work.ready.joined
        assert isinstance(engine, CopyEngine) and stage is not None
        assert isinstance(stage.cast, PreparedCast)
        self.work, self.engine, self.table, self.cast = work, engine, stage.table, stage.cast
        self.k, self.shapes = k, (k.shape[1:], v.shape[1:])
        if kept is None:
            engine.announce()
            fetched = group_cast((k, v), self.cast, engine)
            keys, values = split_columns(fetched.buffer, self.shapes)
            arrival = Arrival(*fetched.word())
        else:
            (keys, values), arrival = kept.of(stage), None
        self.received = Received(keys, values, arrival, work.ready.travel)
        # Before the launch: the kernel may still run when rows are written there.
        self.returned = rows_beside(k, self.cast.num_sent, self.shapes, work.wire_dtype)
        self.partials = engine.room(k, self.cast.num_recv, self.shapes, work.wire_dtype)
        dtype = acc_dtype(k.dtype)
        self.own = torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype)

    def asked(self, qkv: Inputs, result: Pair, gradients: OutGrads) -> tuple[AttnCall, GradCall]:
        """The call of the kernel."""
        work, (out, lse), (dout, delta) = self.work, result, gradients
        numbers = work.softmax_scale, None, work.softcap
        call = AttnCall(*qkv, self.table, *numbers, received=self.received)
        dk, dv = split_columns(self.partials, self.shapes)
        grad = GradCall(
            dout, lse, delta, out if delta is None else None, None, None, self.own,
            work.plan.config.deterministic, (dk, dv), self.engine.written_word,
        )  # fmt: skip
        return call, grad

    def sums(self, count: int) -> tuple[Tensor, Tensor]:
        """Return gradients to the owners of the rows, and add up those of this rank's.

        Args:
            count: by how much the kernel raises the word; 0: rows lie ready at its end.
        """
        counts = self.cast.returned
        if count:
            arriving = self.engine.exchange_written(self.returned, counts, count)
        else:
            arriving = self.engine.exchange(self.partials, self.returned, counts)
        pending = PendingReduce(arriving, self.returned, self.shapes, self.cast)
        dk, dv = add_partials(self.own, [pending], self.k.dtype)
        return dk, dv
