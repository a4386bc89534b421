"""Travel: how long rows are predicted to be on their way during a backward."""

from __future__ import annotations

from typing import NamedTuple

from megatron_magi.config import MagiConfig
from megatron_magi.core.plan.head_shape import HeadShape
from megatron_magi.core.plan.kernel_clock import STEP_FLOPS

LONGEST = 2**40
"""Forward steps that are as good as endless."""


class Travel(NamedTuple):
    """What a GPU computes meanwhile, in forward steps of 128 queries x 128 keys of head_dim 128."""

    keys: int
    """Until received keys and values lie there, from the start of the backward."""
    gradients: int
    """Until their gradients lie at their owners, from when they are complete."""


NO_TRAVEL = Travel(0, 0)
"""Everything lies where it is read."""


def travel(num_rows: int, head_shape: HeadShape, config: MagiConfig) -> Travel:
    """By the cost table: the latency of an exchange, and the bytes at the rate of the link.

    Args:
        num_rows: that a rank receives.
    """
    table = config.costs
    keys_s = num_rows * head_shape.kv_row_bytes / (table.link_gib_s * 2**30)
    gradients_s = keys_s * (2 if config.dkv_reduce_in_fp32 else 1)
    steps_per_s = table.kernel_tflops * 1e12 / STEP_FLOPS
    latency_s = table.stage_latency_us / 1e6
    keys, gradients = (
        round(min((latency_s + s) * steps_per_s, LONGEST)) for s in (keys_s, gradients_s)
    )
    return Travel(0 if config.keep_received_keys else keys, gradients)
