"""group_cast: each row to every rank that reads it, once, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_magi.core.comm.rows import gather_rows
from megatron_magi.core.cuda.tables import DeviceBuffer
from megatron_magi.core.plan import GroupCastPlan
from megatron_magi.core.plan.token_layout import Int32Array

_indices: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass
class PendingCast:
    """Rows on their way. ``wait`` may be called once."""

    work: dist.Work | None
    xs: Sequence[Tensor]
    buffer: Tensor
    plan: GroupCastPlan

    def wait(self) -> tuple[Tensor, ...]:
        """The rows of each tensor, [num_own + num_recv, ...]: views of one buffer.

        Own rows are copied here, so that what runs before this call does not wait for it. On a GPU
        the current stream waits for the others, the host does not.
        """
        device, own = self.xs[0].device, self.plan.num_own
        rows = split_columns(self.buffer, [x.shape[1:] for x in self.xs])
        if own:
            index = None if own == len(self.xs[0]) else own_index(self.plan, device)
            gather_rows(self.xs, index, [x[:own] for x in rows])
        if self.work is not None:
            self.work.wait()
        return rows


def group_cast(
    xs: Sequence[Tensor],
    plan: GroupCastPlan,
    group: dist.ProcessGroup | None,
) -> PendingCast:
    """Send local rows to the ranks that read them, receive the rows this rank reads.

    Args:
        xs: [num_local_tokens, ...] each, one dtype; they travel in one message per peer
            (key and value together). They may not be written to before ``wait``.
        plan: send and receive table of this rank.
        group: the context-parallel group; None for one rank.

    Returns:
        A PendingCast whose rows are ordered as ``plan.own_ranges`` and then ``plan.recv_ranges``.

    Cost: ``plan.num_sent`` rows out and ``plan.num_recv`` in, one all-to-all with uneven splits.
    """
    shapes = [x.shape[1:] for x in xs]
    send = rows_beside(xs[0], plan.num_sent, shapes)
    gather_rows(xs, send_index(plan, xs[0].device), split_columns(send, shapes))
    buffer = rows_beside(xs[0], plan.num_own + plan.num_recv, shapes)
    work = exchange(send, buffer[plan.num_own :], plan.send_counts, plan.recv_counts, group)
    return PendingCast(work, xs, buffer, plan)


def exchange(
    send: Tensor,
    recv: Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    group: dist.ProcessGroup | None,
) -> dist.Work | None:
    """Rows [sum(send_counts), C] to their peers, [sum(recv_counts), C] from them; what to wait on.

    Both are contiguous. One rank alone has nothing to exchange.
    """
    if group is None:
        assert recv.numel() == 0, f"one rank receives nothing, got {list(recv_counts)}"
        return None
    return dist.all_to_all_single(
        _as_bytes(recv),
        _as_bytes(send),
        list(recv_counts),
        list(send_counts),
        group=group,
        async_op=True,
    )


def _as_bytes(rows: Tensor) -> Tensor:
    """Every backend moves those, and gloo knows no bfloat16."""
    if rows.numel() == 0:  # whose strides may be anything
        return rows.new_empty(rows.shape, dtype=torch.uint8)
    return rows.view(torch.uint8)


def send_index(plan: GroupCastPlan, device: torch.device) -> Tensor:
    """int32 [num_sent] local rows in the order they are sent; made once per plan and device."""
    return _index(plan.send_ranges, device)


def own_index(plan: GroupCastPlan, device: torch.device) -> Tensor:
    """int32 [num_own] local rows in front of the received ones; made once per plan and device."""
    return _index(plan.own_ranges, device)


def _index(ranges: Int32Array, device: torch.device) -> Tensor:
    """Kept as long as the array; two casts may share one."""
    made = _indices.setdefault(ranges, {})
    if device not in made:
        made[device] = DeviceBuffer.upload(rows_of(ranges), device)
    buffer: DeviceBuffer = made[device]
    return buffer.here()


def rows_of(ranges: Int32Array) -> Tensor:
    """int32 on the host: every row of int32 [n, 2] ranges."""
    starts = torch.from_numpy(ranges[:, 0].astype("int64"))
    lengths = torch.from_numpy((ranges[:, 1] - ranges[:, 0]).astype("int64"))
    offsets = torch.repeat_interleave(starts - lengths.cumsum(0) + lengths, lengths)
    return (offsets + torch.arange(len(offsets))).to(torch.int32)


def rows_beside(
    like: Tensor,
    num_rows: int,
    shapes: Sequence[torch.Size],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """[num_rows, C] uninitialised, for rows of these shapes side by side; see split_columns."""
    columns = sum(shape.numel() for shape in shapes)
    return like.new_empty(num_rows, columns, dtype=dtype or like.dtype)


def split_columns(rows: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    """The inverse of laying tensors side by side: views with the rows' stride."""
    if all(shape == shapes[0] for shape in shapes):  # nearly always; a fifth of the host time
        return rows.view(len(rows), len(shapes), *shapes[0]).unbind(1)
    parts = rows.split([shape.numel() for shape in shapes], dim=1)
    return tuple(part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
