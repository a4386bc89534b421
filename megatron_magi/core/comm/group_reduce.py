"""group_reduce: the opposite of group_cast. Partial sums return to their owner, who adds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_magi.core.comm.prepared_cast import PreparedCast
from megatron_magi.core.comm.row_buffer import concat_buffer, split_columns
from megatron_magi.core.comm.rows import add_rows, add_rows_into
from megatron_magi.core.comm.transport import PendingRecv, Transport


class PendingPartials(Protocol):
    """Partial sums on their way to the rows' owners."""

    @property
    def cast(self) -> PreparedCast:
        """The cast whose rows the last exchange returns."""

    def wait(self) -> tuple[Tensor, ...]:
        """The partial sums that arrived for each tensor, [cast.num_sent, ...]."""


@dataclass
class PendingReduce:
    """Partial sums that are being sent to their owners; ``add_partials`` takes each object once."""

    work: PendingRecv | None
    buffer: Tensor
    shapes: tuple[torch.Size, ...]
    cast: PreparedCast

    def wait(self) -> tuple[Tensor, ...]:
        """The partial sums that arrived for each tensor, [num_sent, ...]: views of one buffer."""
        if self.work is not None:
            self.work.wait()
        return split_columns(self.buffer, self.shapes)


def group_reduce(
    partials: Tensor,
    shapes: Sequence[torch.Size],
    cast: PreparedCast,
    transport: Transport,
    first_row: int = 0,
) -> PendingReduce:
    """Send partial sums of received rows back to the rows' owners.

    Args:
        partials: [num_recv, C] contiguous, ordered as the plan's ``recv_ranges``: rows of these
            shapes side by side, as ``concat_buffer`` lays them out. It may not be written to until
            the sums are computed.
        cast: the table of the group_cast that brought the rows.
        transport: moves rows between the ranks of the context-parallel group.
        first_row: see ``Transport.exchange``.

    Cost: ``cast.num_recv`` rows out and ``cast.num_sent`` in, one exchange.
    """
    buffer = concat_buffer(partials, cast.num_sent, shapes)
    work = transport.exchange(partials, buffer, cast.returned, first_row)
    return PendingReduce(work, buffer, tuple(shapes), cast)


def add_partials(
    own: Sequence[Tensor], arriving: Sequence[PendingPartials], dtype: torch.dtype
) -> list[Tensor]:
    """The owner's rows plus all partial sums that arrive for them.

    They are added reduce by reduce and peer by peer, in rank order, so two runs give equal bits.

    Args:
        own: [num_local_tokens, ...] each, in the accumulation dtype; they are overwritten.
        dtype: of the sums.

    Returns:
        Contiguous tensors that keep no larger buffer alive.
    """
    for reduce in arriving[:-1]:
        add_rows(own, reduce.wait(), reduce.cast.reduce_sources, reduce.cast.peers)
    if arriving:
        last = arriving[-1]
        cast = last.cast
        return add_rows_into(own, last.wait(), cast.reduce_sources, cast.peers, dtype)
    return [_alone(x.to(dtype).contiguous()) for x in own]


def _alone(x: Tensor) -> Tensor:
    """``x``, copied if it is a view of a larger buffer."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x
