"""The clock by which the planner predicts the time of a rank's kernels."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from megatron_magi.config import MagiConfig
from megatron_magi.core.native import solver
from megatron_magi.core.plan.head_shape import HeadShape

STEP_FLOPS = 4 * 128**3
"""FLOPs of a forward step, 128 queries x 128 keys of head_dim 128, on one processor. The clock's
unit is a thousandth of its time."""

LONGEST_ROW = 2**31
"""The longest time of a row, in the clock's unit; a longer one counts as this."""


class Timing(NamedTuple):
    """The clock and the price of a row, by which the planner judges a trade."""

    clock: solver.KernelClock
    row_time: int
    """Time to receive a row and to return its gradients, in the clock's unit."""


def timing(head_shape: HeadShape, config: MagiConfig) -> Timing | None:
    """The clock for these heads. None if the cost table names no processors (``num_sms=0``); then a
    rank's load is its tiles."""
    table = config.costs
    if table.num_sms == 0:
        return None
    dim = max(head_shape.head_dim, head_shape.value_dim)
    clock = solver.KernelClock(head_shape.num_heads_q, head_shape.num_heads_kv, dim, table.num_sms)
    # With several nodes any row may cross between them.
    link = table.link_gib_s if table.ranks_per_node is None else table.node_link_gib_s
    row_bytes = head_shape.kv_row_bytes
    row_bytes *= 3 if config.dkv_reduce_in_fp32 else 2  # gradients in fp32 are twice as wide
    # Fractions, because rates may be any finite numbers.
    row_s = row_bytes / (Fraction(link) * 2**30)
    unit_s = STEP_FLOPS * table.num_sms / (Fraction(table.kernel_tflops) * 10**15)
    return Timing(clock, round(min(row_s / unit_s, Fraction(LONGEST_ROW))))
