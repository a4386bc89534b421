"""How long rows travel, in steps that a GPU does meanwhile."""

from __future__ import annotations

import pytest

from megatron_magi import CostTable, HeadShape, MagiConfig
from megatron_magi.core.plan.travel import LONGEST, travel

HEADS = HeadShape(64, 8, 128)
STEP = 4 * 128**3


def test_bytes_and_latency_by_the_cost_table() -> None:
    """A row is 8 heads of key and value, 2 bytes each: 4 KiB, whose gradients are twice as long."""
    costs = CostTable(link_gib_s=100.0, kernel_tflops=STEP * 1e-6, stage_latency_us=50.0)
    row_us = 4096 / (100 * 2**30) * 1e6
    made = travel(20_000, HEADS, MagiConfig(costs=costs))
    assert made.keys == round(50 + 20_000 * row_us)
    assert made.gradients == round(50 + 40_000 * row_us)


@pytest.mark.parametrize("num_rows", [0, 1, 5000])
def test_gradients_in_16_bits_travel_as_long_as_keys(num_rows: int) -> None:
    made = travel(num_rows, HEADS, MagiConfig(dkv_reduce_in_fp32=False))
    assert made.keys == made.gradients > 0


def test_kept_keys_lie_there_and_their_gradients_travel() -> None:
    again, kept = (travel(5000, HEADS, MagiConfig(keep_received_keys=k)) for k in (False, True))
    assert kept.keys == 0 < again.keys and kept.gradients == again.gradients > 0


def test_endless_times_are_cut() -> None:
    costs = CostTable(link_gib_s=1e-300)
    assert travel(10, HEADS, MagiConfig(costs=costs)) == (LONGEST, LONGEST)
