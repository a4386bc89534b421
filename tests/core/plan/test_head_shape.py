"""What rows weigh where values have a width of their own: traffic, costs, buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_magi import HeadShape, masks
from megatron_magi.core.plan import make_attn_plan, predict_times
from megatron_magi.viz.plan_facts import receive_bytes
from tests.knobs import magi_config

PLAIN = HeadShape(16, 16, 128)
LATENT = HeadShape(16, 16, 192, head_dim_v=128)


def test_equal_widths_are_one_width() -> None:
    same = HeadShape(16, 16, 128, head_dim_v=128)
    assert same == PLAIN and hash(same) == hash(PLAIN) and same.head_dim_v is None
    assert replace(PLAIN, head_dim=64).value_dim == 64
    assert replace(LATENT, head_dim=64).value_dim == 128
    assert (str(PLAIN), str(LATENT)) == ("16/16x128", "16/16x192+128")


def test_a_row_is_its_key_and_its_value() -> None:
    assert PLAIN.kv_row_bytes == 2 * 16 * 128 * 2
    assert LATENT.kv_row_elements == 16 * (192 + 128)
    assert LATENT.kv_row_bytes == 16 * (192 + 128) * 2


@pytest.mark.parametrize("width", [0, -1, 1.5, 2**16 + 1])
def test_other_widths_are_refused(width: float) -> None:
    wanted = r"HeadShape\.head_dim_v must be an integer from 1 to 65536, got"
    with pytest.raises((TypeError, ValueError), match=wanted):
        HeadShape(4, 4, 64, head_dim_v=width)  # type: ignore[arg-type]


def test_plans_of_other_widths_are_other_plans() -> None:
    plans = [
        make_attn_plan(masks.causal(4096), 4, shape, magi_config()) for shape in (PLAIN, LATENT)
    ]
    assert plans[0].digest != plans[1].digest


def test_buffers_and_time_line_count_both_widths() -> None:
    config = magi_config(overlap_degree=1, forward_mode="staged")
    shapes = PLAIN, LATENT, HeadShape(16, 16, 192)
    plans = [make_attn_plan(masks.causal(4096), 4, shape, config) for shape in shapes]
    a, b, c = map(receive_bytes, plans)
    assert (2 * b == a + c).all() and b.min() > 0
    ends = [predict_times(plan).forward_us for plan in plans]
    assert ends[0] < ends[1] < ends[2]
