"""group_reduce: the mirror of group_cast. Partial sums go home and are added there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_magi.core.comm.group_cast import exchange, rows_beside, rows_of, split_columns
from megatron_magi.core.comm.rows import RowSources, add_rows, add_rows_into
from megatron_magi.core.plan import GroupCastPlan

_sources: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass
class PendingReduce:
    """Partial sums on their way to their owners; for one call of ``sum_at_home``."""

    work: dist.Work | None
    buffer: Tensor
    shapes: tuple[torch.Size, ...]
    plan: GroupCastPlan

    def wait(self) -> tuple[Tensor, ...]:
        """What arrived for each tensor, [num_sent, ...]: views of one buffer."""
        if self.work is not None:
            self.work.wait()
        return split_columns(self.buffer, self.shapes)

    @property
    def peers(self) -> list[slice]:
        """Every peer's part of what arrives; a peer sends a row at most once."""
        bounds = [0, *accumulate(self.plan.send_counts)]
        return [slice(*pair) for pair in pairwise(bounds)]


def group_reduce(
    partials: Tensor,
    shapes: Sequence[torch.Size],
    plan: GroupCastPlan,
    group: dist.ProcessGroup | None,
) -> PendingReduce:
    """Send partial sums of received rows back to the rows' owners.

    Args:
        partials: [num_recv, C] contiguous, ordered as ``plan.recv_ranges``: rows of these shapes
            side by side, as ``rows_beside`` makes them. It may not be written to until the sums
            are made.
        plan: the table of the group_cast that brought the rows.
        group: the context-parallel group; None for one rank.

    Cost: ``plan.num_recv`` rows out and ``plan.num_sent`` in, one all-to-all with uneven splits.
    """
    buffer = rows_beside(partials, plan.num_sent, shapes)
    work = exchange(partials, buffer, plan.recv_counts, plan.send_counts, group)
    return PendingReduce(work, buffer, tuple(shapes), plan)


def sum_at_home(
    own: Sequence[Tensor], arriving: Sequence[PendingReduce], dtype: torch.dtype
) -> list[Tensor]:
    """The owner's rows with everything added that arrives for them.

    Reduce by reduce, peer by peer in rank order: two runs give equal bits.

    Args:
        own: [num_local_tokens, ...] each, in the accumulation dtype; used up.
        dtype: of the sums.

    Returns:
        Contiguous tensors that hold nothing else alive.
    """
    for reduce in arriving[:-1]:
        add_rows(own, reduce.wait(), _row_sources(reduce, len(own[0])), reduce.peers)
    if arriving:
        last = arriving[-1]
        sources = _row_sources(last, len(own[0]))
        return add_rows_into(own, last.wait(), sources, last.peers, dtype)
    return [_alone(x.to(dtype).contiguous()) for x in own]


def _alone(x: Tensor) -> Tensor:
    """``x`` without the rest of a buffer that it may be a view of."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def _row_sources(reduce: PendingReduce, num_rows: int) -> RowSources:
    """Made once per plan and device."""
    device = reduce.buffer.device
    per_device = _sources.setdefault(reduce.plan, {})
    if device not in per_device:
        per_device[device] = RowSources(rows_of(reduce.plan.send_ranges), num_rows, device)
    sources: RowSources = per_device[device]
    return sources
