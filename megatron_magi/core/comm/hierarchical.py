"""group_cast and group_reduce among several nodes: each row crosses to another node once.

Two exchanges stand for one (csrc/planner/nodes.h). In the first, rows go to the ranks of their own
node and to their relays on other nodes; in the second, relays spread them inside their nodes.
Partial sums return the same way: a relay adds those of its node, and one sum crosses back. Both
exchanges run in the context-parallel group, and peers without rows get no message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_magi.core.comm.group_cast import (
    PendingCast,
    group_cast,
)
from megatron_magi.core.comm.group_reduce import PendingPartials, PendingReduce, group_reduce
from megatron_magi.core.comm.prepared_cast import (
    AnyPreparedCast,
    PreparedCast,
    PreparedNodeCast,
)
from megatron_magi.core.comm.row_buffer import split_columns
from megatron_magi.core.comm.rows import add_rows
from megatron_magi.core.comm.transport import PendingRecv, PendingSend, Transport


def cast_rows(
    xs: Sequence[Tensor], cast: AnyPreparedCast, transport: Transport
) -> PendingCast | PendingNodeCast:
    """group_cast, or node_cast if the plan knows of nodes."""
    if isinstance(cast, PreparedNodeCast):
        return node_cast(xs, cast, transport)
    return group_cast(xs, cast, transport)


def reduce_rows(
    partials: Tensor,
    shapes: Sequence[torch.Size],
    cast: AnyPreparedCast,
    transport: Transport,
    dtype: torch.dtype,
    first_row: int = 0,
) -> PendingPartials:
    """group_reduce, or node_reduce if the plan knows of nodes; arguments as there."""
    if isinstance(cast, PreparedNodeCast):
        return node_reduce(partials, shapes, cast, transport, dtype)
    return group_reduce(partials, shapes, cast, transport, first_row)


@dataclass
class PendingNodeCast:
    """Rows that are being received. ``wait`` may be called once."""

    first: PendingCast
    """The first exchange; its buffer has room for the rows of the second behind its own."""
    cast: PreparedNodeCast
    transport: Transport
    spreading: PendingSend | None = None

    @property
    def buffer(self) -> Tensor:
        return self.first.buffer

    def spread(self) -> None:
        """Send on what has arrived for others; waits for it, on a GPU in the current stream."""
        self.first.sending.wait()
        own, arrived = self.cast.num_own, self.cast.first.num_recv
        rows, rest = self.buffer[own : own + arrived], self.buffer[own + arrived :]
        parts = split_columns(rows, self.first.shapes)
        cast = self.cast.spreading
        self.spreading = self.transport.send_rows(parts, cast.send.here(), rest, cast.sent)

    def wait(self) -> tuple[Tensor, ...]:
        """The rows [own | first exchange | second exchange], once they are there; see
        PendingCast.wait."""
        if self.spreading is None:
            self.spread()
        assert self.spreading is not None
        rows = self.first.wait()
        _wait(self.spreading.work, self.buffer.device)
        return rows


def node_cast(
    xs: Sequence[Tensor], cast: PreparedNodeCast, transport: Transport
) -> PendingNodeCast:
    """group_cast among several nodes; arguments and result as there.

    Cost: between nodes, each row once for each node that reads it; inside a node, each row once for
    each of its readers. Two all-to-alls with uneven splits, one after the other.
    """
    pending = PendingNodeCast(
        group_cast(xs, cast.first, transport, cast.spreading.num_recv), cast, transport
    )
    if pending.buffer.is_cuda:
        with _on_relay_stream(pending.buffer):
            pending.spread()
    return pending


@dataclass
class PendingRelay:
    """Partial sums that return through relays; see PendingPartials."""

    partials: Tensor
    """[first.num_recv, C]: partial sums of the rows that the first exchange brought."""
    spreading: PendingReduce
    """The partial sums that other ranks of this node return to this rank."""
    cast: PreparedCast
    """The first exchange."""
    transport: Transport
    dtype: torch.dtype
    """The dtype in which a relay adds."""
    crossing: PendingReduce | None = None

    def send_sums(self) -> None:
        """Add what ranks of this node have returned, and send each sum to the row's owner."""
        cast, shapes = self.spreading.cast, self.spreading.shapes
        sums = self.partials.to(self.dtype)
        arrived = self.spreading.wait()
        add_rows(split_columns(sums, shapes), arrived, cast.reduce_sources, cast.peers)
        sums = sums.to(self.partials.dtype)
        self.crossing = group_reduce(sums, shapes, self.cast, self.transport)

    def wait(self) -> tuple[Tensor, ...]:
        if self.crossing is None:
            self.send_sums()
        assert self.crossing is not None
        buffer = self.crossing.buffer
        _wait(self.crossing.work, buffer.device)
        if buffer.is_cuda:  # its memory is that of the stream of relays
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        return self.crossing.wait()


def node_reduce(
    partials: Tensor,
    shapes: Sequence[torch.Size],
    cast: PreparedNodeCast,
    transport: Transport,
    dtype: torch.dtype,
) -> PendingRelay:
    """group_reduce among several nodes.

    Args:
        partials: [num_recv, C] contiguous, in the order of the plan's ``recv_ranges``; they may be
            overwritten.
        dtype: in which a relay adds the partial sums of its node, in the order of its ranks; each
            sum crosses in the dtype of ``partials``.

    Cost: that of the cast, backwards, and an addition on the relays.
    """
    near, far = partials.split([cast.first.num_recv, cast.spreading.num_recv])
    spreading = group_reduce(far, shapes, cast.spreading, transport)
    pending = PendingRelay(near, spreading, cast.first, transport, dtype)
    if partials.is_cuda:
        with _on_relay_stream(partials, spreading.buffer):
            pending.send_sums()
    return pending


@contextmanager
def _on_relay_stream(*buffers: Tensor) -> Iterator[None]:
    """Work on buffers in the relay stream, so that the current stream need not wait for it."""
    device = buffers[0].device
    stream = _relay_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for buffer in buffers:
        buffer.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


def _wait(work: PendingRecv | None, device: torch.device) -> None:
    """Let the current stream and the relay stream wait. An exchange that the relay stream started
    uses that stream's memory, which its later work must not reuse before the exchange has ended."""
    assert work is not None, "a cast among nodes has a group"
    if device.type == "cuda":
        with torch.cuda.stream(_relay_stream(device)):
            work.wait()
    work.wait()


@lru_cache
def _relay_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
