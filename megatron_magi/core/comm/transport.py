"""Ways to move rows between the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.core.comm.reduce_group import ReduceGroup
from megatron_magi.core.comm.row_buffer import concat_buffer, split_columns
from megatron_magi.core.comm.rows import gather_rows


class RowCounts(NamedTuple):
    """The rows of one exchange, peer by peer."""

    send: list[int]
    """[cp_size]: number of rows sent to each rank, which lie one after the other."""
    recv: list[int]
    """[cp_size]: number of rows received from each rank."""
    starts: list[int] | None = None
    """[cp_size]: where the rows for this rank begin among the rows that each rank sends; None: the
    plan was made for a transport that does not read its peers' memory."""


class PendingRecv(Protocol):
    """Rows that are being received."""

    def wait(self) -> object:
        """Wait for them: the host on the CPU, on a GPU the current stream."""
        ...


class PendingSend(NamedTuple):
    """An exchange under way, and the rows that it sends."""

    rows: Tensor | None
    """Kept until the stream that made them waits. torch.distributed drops its reference at the
    first wait, which may be on another stream, and the memory could then be reused too early."""
    work: PendingRecv | None

    def wait(self) -> None:
        """Let the current stream wait for what arrives."""
        if self.work is not None:
            self.work.wait()


class Transport(Protocol):
    """Moves rows; each rank of the group begins the same exchanges in the same order."""

    uses_sms: bool
    """True if an exchange is a kernel, which has to begin before one that fills the GPU."""
    can_delay_send: bool
    """True if rows in ``room`` may be sent after other exchanges have begun. False if the next
    exchange sends them, because ``room`` lies in the memory that peers read for that exchange."""

    @property
    def name(self) -> str:
        """The name that a log line shows."""
        ...

    def room(
        self, like: Tensor, num_rows: int, shapes: Sequence[torch.Size], dtype: torch.dtype
    ) -> Tensor:
        """Uninitialised rows [num_rows, C] to be filled and sent by the next exchange, or by a
        later one if ``can_delay_send``; see ``concat_buffer``. There is one room at a time."""
        ...

    def send_rows(
        self, xs: Sequence[Tensor], index: Tensor, recv: Tensor, counts: RowCounts
    ) -> PendingSend:
        """Gather rows of ``xs`` and start to exchange them, side by side.

        Args:
            xs: [n, ...] each, of one dtype.
            index: int32 [sum(counts.send)].
            recv: [sum(counts.recv), C]; see ``exchange``.
        """
        ...

    def exchange(
        self, send: Tensor, recv: Tensor, counts: RowCounts, first_row: int = 0
    ) -> PendingRecv | None:
        """Start to send rows [sum(counts.send), C] and to receive [sum(counts.recv), C].

        Args:
            send: contiguous; neither tensor may be written to before the arrival.
            first_row: the row of ``room`` at which ``send`` begins, the same on every rank.

        Returns:
            What to wait for; None if there is one rank alone.
        """
        ...


@dataclass(frozen=True)
class AllToAll:
    """torch.distributed's all-to-all with uneven splits, over any of its backends."""

    group: dist.ProcessGroup | None
    """None for one rank, which exchanges nothing."""
    communicator: ReduceGroup | None = None
    """Runs the exchanges, over the same ranks; None: the group's own communicator does."""
    uses_sms = True
    can_delay_send = True

    @property
    def name(self) -> str:
        backend = "none" if self.group is None else str(dist.get_backend(self.group))
        return f"all_to_all over {backend}"

    def room(
        self, like: Tensor, num_rows: int, shapes: Sequence[torch.Size], dtype: torch.dtype
    ) -> Tensor:
        return concat_buffer(like, num_rows, shapes, dtype)

    def send_rows(
        self, xs: Sequence[Tensor], index: Tensor, recv: Tensor, counts: RowCounts
    ) -> PendingSend:
        rows = gathered(self, xs, index, index.shape[0])
        return PendingSend(rows, self.exchange(rows, recv, counts))

    def exchange(
        self, send: Tensor, recv: Tensor, counts: RowCounts, first_row: int = 0
    ) -> dist.Work | None:
        if self.group is None:
            assert recv.numel() == 0, f"one rank receives nothing, got {counts.recv}"
            return None
        rows = _as_bytes(recv), _as_bytes(send), counts.recv, counts.send
        if self.communicator is not None:
            return self.communicator.all_to_all(*rows)
        return dist.all_to_all_single(*rows, group=self.group, async_op=True)


def gathered(transport: Transport, xs: Sequence[Tensor], index: Tensor, num_rows: int) -> Tensor:
    """Rows of ``xs`` in the transport's room, side by side."""
    shapes = [x.shape[1:] for x in xs]
    rows = transport.room(xs[0], num_rows, shapes, xs[0].dtype)
    gather_rows(xs, index, split_columns(rows, shapes))
    return rows


def _as_bytes(rows: Tensor) -> Tensor:
    """The rows as bytes: every communication backend sends bytes, and gloo knows no bfloat16."""
    if rows.numel() == 0:  # an empty tensor may have any strides
        return rows.new_empty(rows.shape, dtype=torch.uint8)
    return rows.view(torch.uint8)
