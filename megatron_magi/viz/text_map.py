"""A plan in a terminal: the mask as characters, each row in its rank's digit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megatron_magi.core.native import solver
from megatron_magi.viz.plan_facts import NO_DOCUMENTS, LayoutFacts, Layouts

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
HIDDEN = "."


def text_map(layout: LayoutFacts, rows: int = 32, columns: int = 64) -> list[str]:
    """Lines of characters: the owner of a block's middle query where the block shows a cell.

    Args:
        rows, columns: of the map; never more than the sequence has tokens.
    """
    total = layout.mask.total_seqlen_q
    rows, columns = min(rows, total), min(columns, total)
    q_edges = np.linspace(0, total, rows + 1).astype(int).tolist()
    k_edges = np.linspace(0, total, columns + 1).astype(int).tolist()
    owners = _owners(layout, [(q0 + q1) // 2 for q0, q1 in pairwise(q_edges)])
    lines = []
    for (q0, q1), rank in zip(pairwise(q_edges), owners, strict=True):
        band = solver.cut_slices(layout.mask.slices, q0, q1, 0, total)
        owner = DIGITS[rank % len(DIGITS)]
        lines.append(
            "".join(
                owner if len(solver.cut_slices(band, q0, q1, k0, k1)) else HIDDEN
                for k0, k1 in pairwise(k_edges)
            )
        )
    return lines


def _owners(layout: LayoutFacts, queries: list[int]) -> list[int]:
    """The rank of each of these rows."""
    counts = [len(ranges) for ranges in layout.row_ranges]
    ranks = np.repeat(np.arange(layout.cp_size), counts)
    starts = np.concatenate(layout.row_ranges)[:, 0]
    order = np.argsort(starts)
    owners: list[int] = ranks[order][np.searchsorted(starts[order], queries, "right") - 1].tolist()
    return owners


def side_by_side(layouts: Layouts, rows: int = 28, columns: int = 48) -> str:
    """Several layouts of one mask side by side, each under its name and balance."""
    blocks, above = [], []
    for name, layout in layouts.items():
        if layout is None:
            above.append(f"{name}: - ({NO_DOCUMENTS})")
            continue
        lines = text_map(layout, rows, columns)
        width = len(lines[0]) if lines else 0
        head = f"{name}: max/mean {layout.imbalance:.3f}"
        blocks.append([line.ljust(max(width, len(head))) for line in (head, *lines)])
    joined = ["   ".join(parts).rstrip() for parts in zip(*blocks, strict=True)]
    return "\n".join([*above, *joined])
