"""Numbers behind a plan's tables and pictures: layouts, traffic, memory, a modelled time line."""

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


@dataclass(frozen=True)
class StageBar:
    """One stage of one rank on the modelled time line; times in microseconds from the start."""

    rank: int
    stage: int
    num_rows: int
    """Key rows received."""
    num_tiles: int
    """Kernel tiles attended."""
    receive_start: float
    receive_end: float
    compute_start: float
    compute_end: float


@dataclass(frozen=True, eq=False)
class LayoutFacts:
    """A way to spread a mask's rows over ranks, and what it costs."""

    mask: AttnMask
    row_ranges: tuple[npt.NDArray[np.integer[Any]], ...] = field(repr=False)
    """[n, 2] of every rank: its rows as runs, without padding."""
    loads: npt.NDArray[np.int64]
    """int64 [cp_size]: kernel tiles."""
    rows_received: npt.NDArray[np.int64]
    """int64 [cp_size]: key rows, as the layout moves them; padding travels, too."""
    rows_needed: npt.NDArray[np.int64]
    """int64 [cp_size]: key rows that a rank reads and does not own."""
    padding_tokens: int
    """Of all ranks together."""

    @property
    def cp_size(self) -> int:
        return len(self.loads)

    @property
    def imbalance(self) -> float:
        """Tiles of the fullest rank over the mean; 1.0 for an empty mask."""
        total = int(self.loads.sum())
        return int(self.loads.max()) * self.cp_size / total if total else 1.0


Layouts = dict[str, LayoutFacts | None]
"""By name, the usual ones first, ours last; None: the mask has no such layout."""


def compare_layouts(plan: AttnPlan, per_sequence: AttnPlan) -> Layouts:
    """Our plan beside both zigzags.

    Args:
        per_sequence: the same mask planned on ``zigzag_layout``.
    """
    return {
        PER_SEQUENCE: layout_of_plan(per_sequence, all_travel=True),
        PER_DOCUMENT: per_document(plan),
        OURS: layout_of_plan(plan),
    }


def layout_of_plan(plan: AttnPlan, all_travel: bool = False) -> LayoutFacts:
    """The plan's layout; ``all_travel``: with a ring or all-gather in place of its exchange."""
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
    """Zigzag per document of the plan's mask and tiles; None: it is not packed documents."""
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


def traffic_matrix(plan: AttnPlan) -> npt.NDArray[np.int64]:
    """int64 [cp_size, cp_size]: key rows that rank i sends to rank j in one forward."""
    rows = np.zeros((plan.cp_size, plan.cp_size), dtype=np.int64)
    _, dst, src, start, end = plan.transfers.T
    np.add.at(rows, (src, dst), end - start)
    return rows


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

    While a stage computes, the next one's keys and values arrive: two stages are alive. A stage on
    own and received rows has both in its buffer.
    """
    row_bytes = plan.head_shape.kv_row_bytes
    views = [plan.rank_plan(rank).forward_stages for rank in range(plan.cp_size)]
    return np.array([row_bytes * most_buffered_rows(stages) for stages in views], dtype=np.int64)


def timeline(plan: AttnPlan) -> list[StageBar]:
    """The forward of every rank under the plan's cost table; a model, not a measurement.

    A stage's rows travel after the previous stage's, and once the stage two before it has left the
    compute stream; they are attended when they are there and the stage before is done. Stages that
    are merged keep out in fp32: a pass to write it, one more for every stage merged.
    """
    heads, table = plan.head_shape, plan.config.costs
    row_us = heads.kv_row_bytes / (table.link_gib_s * 2**30) * 1e6
    score_and_out = heads.num_heads_q * (heads.head_dim + heads.value_dim)
    tile_us = 2 * score_and_out * table.tile_q * table.tile_k / (table.kernel_tflops * 1e6)
    out_bytes = 8 * plan.layout.num_local_tokens * heads.num_heads_q * heads.value_dim
    pass_us = out_bytes / (table.memory_gib_s * 2**30) * 1e6
    bars: list[StageBar] = []
    for rank in range(plan.cp_size):
        view = plan.rank_plan(rank)
        done: list[StageBar] = []
        for i, stage in enumerate(view.forward_stages):
            rows = stage.cast.num_recv if stage.cast else 0
            tiles = num_tiles(plan, stage.slices, stage.num_keys)
            ready = done[i - 2].compute_end if i > 1 else 0.0
            receive_start = max(ready, done[-1].receive_end if done else 0.0)
            latency_us = table.stage_latency_us
            receive_end = receive_start + rows * row_us + (latency_us if rows else 0.0)
            compute_start = max(receive_end, done[-1].compute_end if done else 0.0)
            extra = latency_us / 4 if i else 0.0
            extra += pass_us if view.forward_merges else 0.0
            compute_end = compute_start + tiles * tile_us + extra
            done.append(
                StageBar(rank, i, rows, tiles, receive_start, receive_end, compute_start,
                         compute_end)
            )  # fmt: skip
        bars += done
    return bars


def exposed_share(plan: AttnPlan) -> float:
    """Share of the modelled transfer time in which a rank waits, over all ranks; 0 without any."""
    receiving = waiting = 0.0
    done = {rank: 0.0 for rank in range(plan.cp_size)}
    for bar in timeline(plan):
        receiving += bar.receive_end - bar.receive_start
        waiting += bar.compute_start - done[bar.rank]
        done[bar.rank] = bar.compute_end
    return waiting / receiving if receiving else 0.0


def num_tiles(plan: AttnPlan, slices: npt.NDArray[np.int32], num_keys: int) -> int:
    """Key tiles that the forward kernel walks for one stage of one rank."""
    tiles = (plan.config.costs.tile_q, plan.config.costs.tile_k)
    return int(solver.fwd_work_list(slices, plan.layout.num_local_tokens, num_keys, *tiles).steps)
