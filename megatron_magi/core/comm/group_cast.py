"""group_cast: send each row once to every rank that reads it, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_magi.core.comm.prepared_cast import PreparedCast
from megatron_magi.core.comm.row_buffer import concat_buffer, split_columns
from megatron_magi.core.comm.rows import gather_rows
from megatron_magi.core.comm.transport import PendingSend, Transport


@dataclass
class PendingCast:
    """Rows that are being received. ``wait`` may be called once."""

    sending: PendingSend
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
            gather_rows(self.xs, self.cast.own_rows(), rows, self.cast.num_own)
        self.sending.wait()
        return rows


def group_cast(
    xs: Sequence[Tensor],
    cast: PreparedCast,
    transport: Transport,
    room: int = 0,
) -> PendingCast:
    """Send local rows to the ranks that read them, receive the rows this rank reads.

    Args:
        xs: [num_local_tokens, ...] each, one dtype; they are sent in one message per peer
            (key and value together). They may not be written to before ``wait``.
        cast: send and receive tables of this rank, prepared for the device of ``xs``.
        transport: moves rows between the ranks of the context-parallel group.
        room: rows to leave behind the received ones, for the caller to fill.

    Returns:
        A PendingCast whose rows are ordered as the plan's ``own_ranges`` and then ``recv_ranges``.

    Cost: ``cast.num_sent`` rows out and ``cast.num_recv`` in, one exchange.
    """
    shapes = [x.shape[1:] for x in xs]
    own, end = cast.num_own, cast.num_own + cast.num_recv
    buffer = concat_buffer(xs[0], end + room, shapes)
    into = buffer[own:end] if own or room else buffer
    sending = transport.send_rows(xs, cast.send.here(), into, cast.sent)
    return PendingCast(sending, xs, shapes, buffer, cast)
