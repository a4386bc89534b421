"""group_cast: send each row once to every rank that reads it, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.core.comm.prepared_cast import PreparedCast
from megatron_magi.core.comm.rows import gather_rows


@dataclass
class PendingCast:
    """Rows that are being received. ``wait`` may be called once."""

    work: dist.Work | None
    xs: Sequence[Tensor]
    shapes: Sequence[torch.Size]
    buffer: Tensor
    cast: PreparedCast

    def wait(self) -> tuple[Tensor, ...]:
        """The rows of each tensor, [num_own + num_recv, ...]: views of one buffer.

        Own rows are copied by this call, so that work launched before it does not wait for the
        copy. On a GPU the current stream waits for the received rows, and the host does not.
        """
        rows = split_columns(self.buffer, self.shapes)
        if self.cast.num_own:
            index = None if self.cast.own is None else self.cast.own.here()
            gather_rows(self.xs, index, rows, self.cast.num_own)
        if self.work is not None:
            self.work.wait()
        return rows


def group_cast(
    xs: Sequence[Tensor],
    cast: PreparedCast,
    group: dist.ProcessGroup | None,
    room: int = 0,
) -> PendingCast:
    """Send local rows to the ranks that read them, receive the rows this rank reads.

    Args:
        xs: [num_local_tokens, ...] each, one dtype; they are sent in one message per peer
            (key and value together). They may not be written to before ``wait``.
        cast: send and receive tables of this rank, prepared for the device of ``xs``.
        group: the context-parallel group; None for one rank.
        room: rows to leave behind the received ones, for the caller to fill.

    Returns:
        A PendingCast whose rows are ordered as the plan's ``own_ranges`` and then ``recv_ranges``.

    Cost: ``cast.num_sent`` rows out and ``cast.num_recv`` in, one all-to-all with uneven splits.
    """
    shapes = [x.shape[1:] for x in xs]
    own, end = cast.num_own, cast.num_own + cast.num_recv
    buffer = rows_beside(xs[0], end + room, shapes)
    work = send_rows(xs, cast, buffer[own:end] if own or room else buffer, group)
    return PendingCast(work, xs, shapes, buffer, cast)


def send_rows(
    xs: Sequence[Tensor], cast: PreparedCast, into: Tensor, group: dist.ProcessGroup | None
) -> dist.Work | None:
    """Start to send the cast's rows of ``xs`` and to receive rows side by side in ``into``."""
    shapes = [x.shape[1:] for x in xs]
    send = rows_beside(xs[0], cast.num_sent, shapes)
    gather_rows(xs, cast.send.here(), split_columns(send, shapes))
    return exchange(send, into, cast.send_counts, cast.recv_counts, group)


def exchange(
    send: Tensor,
    recv: Tensor,
    send_counts: list[int],
    recv_counts: list[int],
    group: dist.ProcessGroup | None,
) -> dist.Work | None:
    """Start to send rows [sum(send_counts), C] to peers and to receive [sum(recv_counts), C].

    Both tensors are contiguous. The result is the work to wait on; one rank alone has none.
    """
    if group is None:
        assert recv.numel() == 0, f"one rank receives nothing, got {recv_counts}"
        return None
    return dist.all_to_all_single(
        _as_bytes(recv),
        _as_bytes(send),
        recv_counts,
        send_counts,
        group=group,
        async_op=True,
    )


def _as_bytes(rows: Tensor) -> Tensor:
    """The rows as bytes: every communication backend sends bytes, and gloo knows no bfloat16."""
    if rows.numel() == 0:  # an empty tensor may have any strides
        return rows.new_empty(rows.shape, dtype=torch.uint8)
    return rows.view(torch.uint8)


def rows_beside(
    like: Tensor,
    num_rows: int,
    shapes: Sequence[torch.Size],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """An uninitialised [num_rows, C], for rows of these shapes side by side; see split_columns."""
    columns = 0
    for shape in shapes:
        columns += shape.numel()
    return like.new_empty((num_rows, columns), dtype=dtype)


def split_columns(rows: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    """The inverse of laying tensors side by side: views with the rows' stride."""
    if shapes.count(shapes[0]) == len(shapes):  # the usual case, in a fifth of the host time
        return rows.view(rows.shape[0], len(shapes), *shapes[0]).unbind(1)
    parts = rows.split([shape.numel() for shape in shapes], dim=1)
    return tuple(part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
