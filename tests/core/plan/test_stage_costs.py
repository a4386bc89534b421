"""What a stage's rows, tiles and passes take under a cost table, in picoseconds."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_magi import HeadShape
from megatron_magi.core.plan.stage_costs import LONGEST_PS, stage_costs
from tests.knobs import magi_config

PLAIN = HeadShape(16, 16, 128)
LATENT = HeadShape(16, 16, 192, head_dim_v=128)


def test_costs_count_both_widths() -> None:
    config = magi_config(link_gib_s=1e-3, kernel_tflops=1e-3, memory_gib_s=1e-3)
    narrow, wide = PLAIN, HeadShape(16, 16, 192)
    a, b, c = (stage_costs(shape, config, 4096) for shape in (narrow, LATENT, wide))
    for name in ("row_ps", "grad_row_ps", "tile_ps"):  # both widths, added
        low, middle, high = (getattr(costs, name) for costs in (a, b, c))
        assert 2 * middle == pytest.approx(low + high, rel=1e-6), name
    assert b.pass_ps == a.pass_ps, "out is as wide as values"


def test_costs_are_those_of_the_table() -> None:
    table = {"tile_q": 64, "tile_k": 32, "link_gib_s": 100.0, "kernel_tflops": 500.0,
             "memory_gib_s": 2000.0, "stage_latency_us": 8.0, "node_link_gib_s": 40.0}  # fmt: skip
    costs = stage_costs(HeadShape(8, 2, 64), magi_config(**table), 1000)
    row_bytes = 2 * 2 * 64 * 2
    assert costs.row_ps == round(row_bytes / (100 * 2**30) * 1e12)
    assert costs.crossing_row_ps == round(row_bytes / (40 * 2**30) * 1e12)
    assert costs.tile_ps == round(4 * 8 * 64 * 64 * 32 / 500e12 * 1e12)
    assert costs.pass_ps == round(8 * 1000 * 8 * 64 / (2000 * 2**30) * 1e12)
    assert (costs.exchange_ps, costs.call_ps) == (8_000_000, 2_000_000)


def test_gradients_in_fp32_are_twice_as_heavy_on_their_way_home() -> None:
    half, full = (
        stage_costs(PLAIN, magi_config(link_gib_s=1e-3, dkv_reduce_in_fp32=wide), 4096)
        for wide in (False, True)
    )
    assert half.grad_row_ps == half.row_ps == full.row_ps
    assert full.grad_row_ps == pytest.approx(2 * half.grad_row_ps)


def test_kept_rows_are_not_received_again() -> None:
    again, kept = (
        stage_costs(PLAIN, magi_config(keep_received_keys=keeps), 4096) for keeps in (False, True)
    )
    work = np.array([[100, 100, 50, 4096]])
    assert not again.keeps_rows and kept.keeps_rows
    assert kept.forward_stages(work, 1, 2).tolist() == again.forward_stages(work, 1, 2).tolist()
    assert kept.backward_times(work, 1) < again.backward_times(work, 1)


def test_no_cost_is_beyond_the_longest() -> None:
    """64-bit sums of many costs must not overflow."""
    costs = stage_costs(PLAIN, magi_config(link_gib_s=1e-300, kernel_tflops=1e-300), 4096)
    assert costs.row_ps == costs.grad_row_ps == costs.tile_ps == LONGEST_PS
