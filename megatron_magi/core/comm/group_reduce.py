"""group_reduce: the mirror of group_cast. Partial sums go home and are added there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.core.comm.group_cast import exchange, send_index, split_columns
from megatron_magi.core.plan import GroupCastPlan


@dataclass
class PendingReduce:
    """Partial sums on their way to their owners. ``add_into`` may be called once."""

    work: dist.Work | None
    buffer: Tensor
    shapes: tuple[torch.Size, ...]
    plan: GroupCastPlan

    def add_into(self, owned: Sequence[Tensor]) -> None:
        """Add what arrived to the owner's rows, peer by peer in rank order.

        A peer sends a row at most once, so the order of additions is fixed and two runs give
        equal bits.

        Args:
            owned: [num_local_tokens, ...] accumulators; the partial sums are added in their dtype.
        """
        if self.work is not None:
            self.work.wait()
        index = send_index(self.plan, self.buffer.device)
        bounds = [0, *accumulate(self.plan.send_counts)]
        for start, end in pairwise(bounds):
            rows = split_columns(self.buffer[start:end], self.shapes)
            for target, part in zip(owned, rows, strict=True):
                target.index_add_(0, index[start:end], part.to(target.dtype))


def group_reduce(
    partials: Sequence[Tensor], plan: GroupCastPlan, group: dist.ProcessGroup | None
) -> PendingReduce:
    """Send partial sums of received rows back to the rows' owners.

    Args:
        partials: [num_recv, ...] each, one dtype, ordered as ``plan.recv_ranges``.
        plan: the table of the group_cast that brought the rows.
        group: the context-parallel group; None for one rank.

    Cost: ``plan.num_recv`` rows out and ``plan.num_sent`` in, one all-to-all with uneven splits.
    """
    send = torch.cat([x.flatten(1) for x in partials], dim=1)
    buffer, work = exchange(send, plan.recv_counts, plan.send_counts, group)
    return PendingReduce(work, buffer, tuple(x.shape[1:] for x in partials), plan)
