"""A cost table in picoseconds, in which the planner compares stages."""

from __future__ import annotations

from megatron_magi.config import MagiConfig
from megatron_magi.core.native import solver
from megatron_magi.core.plan.head_shape import HeadShape

LONGEST_PS = 2.0**60
"""The longest cost, 13 days; a longer one counts as this."""


def stage_costs(head_shape: HeadShape, config: MagiConfig, num_tokens: int) -> solver.StageCosts:
    """The cost table in picoseconds; see StageCosts of csrc/planner/stages.h.

    Args:
        num_tokens: rows of one rank.
    """
    table = config.costs
    score_and_out = head_shape.num_heads_q * (head_shape.head_dim + head_shape.value_dim)
    tile_flops = 2 * score_and_out * table.tile_q * table.tile_k
    row_s = head_shape.kv_row_bytes / (table.link_gib_s * 2**30)
    out_elements = num_tokens * head_shape.num_heads_q * head_shape.value_dim
    pass_s = 8 * out_elements / (table.memory_gib_s * 2**30)
    grad_s = row_s * (2 if config.dkv_reduce_in_fp32 else 1)
    times = {
        "row_ps": row_s * 1e12,
        "grad_row_ps": grad_s * 1e12,
        "tile_ps": tile_flops / table.kernel_tflops,
        "exchange_ps": table.stage_latency_us * 1e6,
        "call_ps": table.stage_latency_us * 1e6 / 4,
        "pass_ps": pass_s * 1e12,
        "crossing_row_ps": head_shape.kv_row_bytes / (table.node_link_gib_s * 2**30) * 1e12,
    }
    rounded = {name: round(min(t, LONGEST_PS)) for name, t in times.items()}
    return solver.StageCosts(**rounded, keeps_rows=config.keep_received_keys)
