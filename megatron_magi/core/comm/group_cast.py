"""group_cast: each row to every rank that reads it, once, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_magi.core.plan import GroupCastPlan

_send_indices: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass
class PendingCast:
    """Rows on their way. ``wait`` may be called once."""

    work: dist.Work | None
    buffer: Tensor
    shapes: tuple[torch.Size, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """The received rows of each tensor, [num_recv, ...], views of one buffer.

        On a GPU the current stream waits, the host does not.
        """
        if self.work is not None:
            self.work.wait()
        return split_columns(self.buffer, self.shapes)


def group_cast(
    xs: Sequence[Tensor], plan: GroupCastPlan, group: dist.ProcessGroup | None
) -> PendingCast:
    """Send local rows to the ranks that read them, receive the rows this rank reads.

    Args:
        xs: [num_local_tokens, ...] each, one dtype; they travel in one message per peer
            (key and value together).
        plan: send and receive table of this rank.
        group: the context-parallel group; None for one rank.

    Returns:
        A PendingCast whose rows are ordered as ``plan.recv_ranges``.

    Cost: ``plan.num_sent`` rows out and ``plan.num_recv`` in, one all-to-all with uneven splits.
    """
    send = gather_columns(xs, send_index(plan, xs[0].device))
    shapes = tuple(x.shape[1:] for x in xs)
    recv, work = exchange(send, plan.send_counts, plan.recv_counts, group)
    return PendingCast(work, recv, shapes)


def exchange(
    send: Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, dist.Work | None]:
    """Rows [sum(send_counts), C] to their peers; [sum(recv_counts), C] and the work to wait on."""
    recv = send.new_empty(sum(recv_counts), send.shape[1])
    if group is None:
        assert recv.numel() == 0, f"one rank receives nothing, got {list(recv_counts)}"
        return recv, None
    # As bytes: every backend moves those, and gloo knows no bfloat16.
    work = dist.all_to_all_single(
        recv.view(torch.uint8),
        send.view(torch.uint8),
        list(recv_counts),
        list(send_counts),
        group=group,
        async_op=True,
    )
    return recv, work


def send_index(plan: GroupCastPlan, device: torch.device) -> Tensor:
    """int64 [num_sent] local rows in the order they are sent; made once per plan and device."""
    per_device = _send_indices.setdefault(plan, {})
    if device not in per_device:
        starts = torch.from_numpy(plan.send_ranges[:, 0].astype("int64"))
        lengths = torch.from_numpy(
            (plan.send_ranges[:, 1] - plan.send_ranges[:, 0]).astype("int64")
        )
        offsets = torch.repeat_interleave(starts - lengths.cumsum(0) + lengths, lengths)
        per_device[device] = (offsets + torch.arange(len(offsets))).to(device)
    index: Tensor = per_device[device]
    return index


def gather_columns(xs: Sequence[Tensor], index: Tensor) -> Tensor:
    """Rows ``index`` of every tensor side by side: [len(index), total columns]."""
    return torch.cat([x.index_select(0, index).flatten(1) for x in xs], dim=1)


def split_columns(rows: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    """The inverse of laying tensors side by side: views with the rows' stride."""
    parts = rows.split([shape.numel() for shape in shapes], dim=1)
    return tuple(part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
