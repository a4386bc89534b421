"""The time line: a bar for what every stage receives and computes, where the planner puts it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.config import ForwardMode
from megatron_magi.core.plan import AttnPlan, make_attn_plan, predict_times
from megatron_magi.viz.plan_facts import forward_stage_rows
from megatron_magi.viz.style import new_figure, short
from megatron_magi.viz.timeline_figure import RECEIVE_COLOR, _bar, timeline_figure

to_rgba = pytest.importorskip("matplotlib.colors", reason="draws").to_rgba

MASK = masks.from_cu_seqlens([0, 3000, 3100, 8192])


def plan(cp_size: int, degree: int = 2, mode: ForwardMode = "staged") -> AttnPlan:
    config = MagiConfig(overlap_degree=degree, forward_mode=mode)
    return make_attn_plan(MASK, cp_size, HeadShape(8, 2, 64), config)


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("mode", ["staged", "local_first", "at_once"])
def test_bars_stand_where_the_planner_puts_them(mode: ForwardMode) -> None:
    p = plan(3, mode=mode)
    (axes,) = timeline_figure(p).axes
    bars = [
        (bar.get_facecolor() == to_rgba(RECEIVE_COLOR), bar.get_x(), bar.get_x() + bar.get_width())
        for bar in axes.patches
    ]
    for number, is_receive in enumerate((True, False)):
        drawn = [span for kind, *span in bars if kind is is_receive]
        wanted = predict_times(p).forward[..., 2 * number : 2 * number + 2].reshape(-1, 2)
        np.testing.assert_allclose(drawn, wanted, atol=1e-9)


def test_every_rank_has_a_row_of_its_own_color() -> None:
    (axes,) = timeline_figure(plan(4)).axes
    bars = [bar for bar in axes.patches if bar.get_facecolor() != to_rgba(RECEIVE_COLOR)]
    rows = {(round(bar.get_y() + bar.get_height() / 2), bar.get_facecolor()) for bar in bars}
    assert {row for row, _ in rows} == {0, 1, 2, 3} and len(rows) == 4
    assert len({color for _, color in rows}) == 4
    low, high = axes.get_ylim()
    assert low > high, "rank 0 is at the top"


def test_bars_that_are_wide_enough_say_what_they_are() -> None:
    p = plan(2)
    (axes,) = timeline_figure(p).axes
    rows = {short(n) for n in forward_stage_rows(p).flat}
    assert "own keys" in texts(axes) and "stage 1" in texts(axes)
    assert set(texts(axes)) <= {"own keys", "stage 0", "stage 1", "stage 2", *rows}
    assert rows & set(texts(axes))
    assert texts(timeline_figure(plan(17)).axes[0]) == [], "too many ranks"


@pytest.mark.parametrize(("span", "text"), [((20.0, 40.0), ["stage 1"]), ((90.0, 91.0), [])])
def test_a_text_stands_in_the_middle_of_a_bar_that_it_fits(
    span: tuple[float, float], text: list[str]
) -> None:
    _, axes = new_figure(1, 1, 4, 2)
    _bar(axes, (3.0, 0.5), list(span), "black", "stage 1", 100.0)
    assert texts(axes) == text
    assert [found.get_position() for found in axes.texts] == [(30.0, 3.0)] * len(text)


def test_the_title_says_how_much_hides_and_the_axis_what_was_assumed() -> None:
    p = plan(4)
    (axes,) = timeline_figure(p).axes
    hidden = 1 - predict_times(p).exposed_share
    assert axes.get_title(loc="left").endswith(f"; {hidden:.0%} of the transfer time hides")
    assert f"{p.config.costs.kernel_tflops:g} TFLOP/s" in axes.get_xlabel()
    assert axes.get_xlim()[1] == pytest.approx(predict_times(p).forward_us * 1.01)
