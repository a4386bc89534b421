"""A plan in a terminal: the mask as characters, each row in its rank's digit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megatron_magi.core.native import solver
from megatron_magi.core.plan import AttnPlan

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
HIDDEN = "."


def text_map(plan: AttnPlan, rows: int = 32, columns: int = 64) -> list[str]:
    """Lines of characters: the owner of a block's middle query where the block shows a cell.

    Args:
        rows, columns: of the map; never more than the sequence has tokens.
    """
    total = plan.mask.total_seqlen_q
    rows, columns = min(rows, total), min(columns, total)
    q_edges = np.linspace(0, total, rows + 1).astype(int).tolist()
    k_edges = np.linspace(0, total, columns + 1).astype(int).tolist()
    owners = plan.dispatch.chunk_ranks
    lines = []
    for q0, q1 in pairwise(q_edges):
        band = solver.cut_slices(plan.mask.slices, q0, q1, 0, total)
        owner = DIGITS[owners[(q0 + q1) // 2 // plan.dispatch.chunk_size] % len(DIGITS)]
        lines.append(
            "".join(
                owner if len(solver.cut_slices(band, q0, q1, k0, k1)) else HIDDEN
                for k0, k1 in pairwise(k_edges)
            )
        )
    return lines


def side_by_side(named: dict[str, AttnPlan], rows: int = 28, columns: int = 48) -> str:
    """Several plans of one mask beside each other, each under its name and balance."""
    blocks = []
    for name, plan in named.items():
        lines = text_map(plan, rows, columns)
        width = len(lines[0]) if lines else 0
        head = f"{name}: max/mean {plan.imbalance:.3f}"
        blocks.append([line.ljust(max(width, len(head))) for line in (head, *lines)])
    return "\n".join("   ".join(parts).rstrip() for parts in zip(*blocks, strict=True))
