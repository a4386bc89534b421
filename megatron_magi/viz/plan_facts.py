"""The numbers of a plan's tables and pictures: layouts, traffic, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_magi.core.mask import AttnMask
from megatron_magi.core.native import solver
from megatron_magi.core.plan import AttnPlan, TokenLayout, most_buffered_rows
from megatron_magi.viz.document_zigzag import DocumentZigzag

OURS = "megatron_magi"
PER_SEQUENCE = "zigzag per sequence"
PER_DOCUMENT = "zigzag per document"
"""Names of the layouts that are compared, wherever they are shown."""

NO_DOCUMENTS = "only masks of packed documents under one rule have a zigzag per document"
WHY_MORE_ROWS = (
    "Balance is bought with rows: chunks move to ranks that have less work, "
    "and a step takes as long as its fullest rank"
)


@dataclass(frozen=True, eq=False)
class LayoutFacts:
    """A way to spread a mask's rows over ranks, and what it costs."""

    mask: AttnMask
    row_ranges: tuple[npt.NDArray[np.integer[Any]], ...] = field(repr=False)
    """[n, 2] of every rank: its rows as runs, without padding."""
    loads: npt.NDArray[np.int64]
    """int64 [cp_size]: kernel tiles; those of a plan are in proportion to its predicted times."""
    rows_received: npt.NDArray[np.int64]
    """int64 [cp_size]: key rows that a rank receives in this layout, padding included."""
    rows_needed: npt.NDArray[np.int64]
    """int64 [cp_size]: key rows that a rank reads and does not own."""
    padding_tokens: int
    """The padding of all ranks together."""

    @property
    def cp_size(self) -> int:
        return len(self.loads)

    @property
    def imbalance(self) -> float:
        """Largest load over the mean; 1.0 for an empty mask."""
        total = int(self.loads.sum())
        return int(self.loads.max()) * self.cp_size / total if total else 1.0


Layouts = dict[str, LayoutFacts | None]
"""Layouts by name, the usual ones first, ours last; None: the mask has no such layout."""


def compare_layouts(plan: AttnPlan, per_sequence: AttnPlan) -> Layouts:
    """The plan and both zigzags.

    Args:
        per_sequence: the same mask planned on ``zigzag_layout``.
    """
    return {
        PER_SEQUENCE: layout_of_plan(per_sequence, all_travel=True),
        PER_DOCUMENT: per_document(plan),
        OURS: layout_of_plan(plan),
    }


def layout_of_plan(plan: AttnPlan, all_travel: bool = False) -> LayoutFacts:
    """The plan's layout; ``all_travel``: with a ring or all-gather instead of its exchange."""
    layout, needed = plan.layout, plan.rows_received
    ranges = [
        np.minimum(layout.local_ranges(rank), layout.total_seqlen) for rank in range(plan.cp_size)
    ]
    return LayoutFacts(
        plan.mask,
        tuple(r[r[:, 0] < r[:, 1]] for r in ranges),
        plan.loads,
        np.full_like(needed, ring_rows(plan)) if all_travel else needed,
        needed,
        layout.padded_seqlen - layout.total_seqlen,
    )


def per_document(plan: AttnPlan) -> LayoutFacts | None:
    """Zigzag per document of the plan's mask and tiles; None if it is not packed documents."""
    layout = DocumentZigzag.of(plan.mask, plan.cp_size)
    if layout is None:
        return None
    needed = layout.rows_needed()
    return LayoutFacts(
        plan.mask,
        tuple(layout.runs(rank)[:, :2] for rank in range(plan.cp_size)),
        layout.loads(plan.config.costs.tile_q, plan.config.costs.tile_k),
        np.full_like(needed, (plan.cp_size - 1) * layout.num_local_tokens),
        needed,
        layout.padding_tokens,
    )


def zigzag_layout(total_seqlen: int, cp_size: int) -> TokenLayout:
    """Zigzag per sequence: 2 * cp chunks of the whole stream, wherever documents begin; rank r
    owns chunk r from the front and from the back."""
    ranks = [*range(cp_size), *reversed(range(cp_size))]
    chunk_size = max(1, -(-total_seqlen // len(ranks)))
    return TokenLayout(total_seqlen, chunk_size, cp_size, np.array(ranks, dtype=np.int32))


def rows_between_nodes(plan: AttnPlan) -> tuple[int, int]:
    """Key rows that cross between nodes in one forward: as the plan sends them, each once to a
    node, and if every reader received its own. (0, 0) if the plan tells no nodes apart."""
    per_node = plan.ranks_per_node
    if not per_node:
        return 0, 0
    _, dst, src, start, end = plan.transfers.T
    readers = int((end - start)[dst // per_node != src // per_node].sum())
    legs = solver.crossing_leg(plan.transfers, per_node)
    return int((legs[:, 4] - legs[:, 3]).sum()), readers


def ring_rows(plan: AttnPlan) -> int:
    """Key rows a rank receives when every rank's rows go to every rank (ring, all-gather)."""
    return (plan.cp_size - 1) * plan.layout.num_local_tokens


def stage_rows(plan: AttnPlan) -> npt.NDArray[np.int64]:
    """int64 [cp_size, num_stages]: key rows received; the backward's stages."""
    rows = np.zeros((plan.cp_size, plan.num_stages), dtype=np.int64)
    stage, dst, _, start, end = plan.transfers.T
    np.add.at(rows, (dst, stage), end - start)
    return rows


def receive_bytes(plan: AttnPlan) -> npt.NDArray[np.int64]:
    """int64 [cp_size]: peak of the forward's key and value buffers.

    While a stage computes, the next one's keys and values arrive, so two buffers are alive. The
    buffer of a stage on own and received rows holds both.
    """
    row_bytes = plan.head_shape.kv_row_bytes
    views = [plan.rank_plan(rank).forward_stages for rank in range(plan.cp_size)]
    return np.array([row_bytes * most_buffered_rows(stages) for stages in views], dtype=np.int64)


def exchange_bytes(plan: AttnPlan) -> npt.NDArray[np.int64]:
    """int64 [cp_size]: peak of one layer's buffers for keys, values, sent queries and gradients, in
    the forward or the backward, whichever is larger."""
    return np.maximum(receive_bytes(plan), _backward_bytes(plan)) + _query_bytes(plan)


def _backward_bytes(plan: AttnPlan) -> npt.NDArray[np.int64]:
    """int64 [cp_size]: keys and values of two stages, and the gradients of all received rows."""
    heads = plan.head_shape
    on_wire = 4 if plan.config.dkv_reduce_in_fp32 else heads.bytes_per_element
    found = []
    for rank in range(plan.cp_size):
        own, *remote = plan.rank_plan(rank).stages
        received = sum(s.cast.num_recv for s in (own, *remote) if s.cast is not None)
        keys = heads.bytes_per_element * most_buffered_rows([*remote, own])
        found.append(heads.kv_row_elements * (keys + on_wire * received))
    return np.array(found, dtype=np.int64)


def _query_bytes(plan: AttnPlan) -> npt.NDArray[np.int64]:
    """int64 [cp_size]: buffers of a backward for sent queries. q, dout, lse, delta and dq of those
    that arrive, the gradients that they add to own keys, and dq that returns."""
    heads = plan.head_shape
    _, dst, src, start, end = plan.query_transfers.T.astype(np.int64)
    arrived, sent = (
        np.bincount(rank, end - start, plan.cp_size).astype(np.int64) for rank in (dst, src)
    )
    widths = heads.head_dim + heads.value_dim
    row = heads.num_heads_q * (widths * heads.bytes_per_element + (2 + heads.head_dim) * 4)
    own = plan.key_layout.num_local_tokens * heads.kv_row_elements * 4
    returned = heads.num_heads_q * heads.head_dim * 4
    found: npt.NDArray[np.int64] = arrived * row + (arrived > 0) * own + sent * returned
    return found


def forward_stage_rows(plan: AttnPlan) -> npt.NDArray[np.int64]:
    """int64 [cp_size, num_stages]: key rows received; the forward's stages."""
    if plan.forward_mode == "staged":
        return stage_rows(plan)
    rows = plan.rows_received[:, None]
    return np.pad(rows, ((0, 0), (1, 0))) if plan.forward_mode == "local_first" else rows
