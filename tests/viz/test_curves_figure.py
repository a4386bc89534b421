"""The figure of a comparison: which curve is whose, what failed, and where the limits are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_magi.compare.differences import Comparison, Gates
from megatron_magi.viz.curves_figure import FAILED, FLOOR, curves_figure
from tests.compare.evidence import curves

pytest.importorskip("matplotlib", reason="draws")

GATES = Gates(any_step_loss=1e-3, any_step_grad_norm=1e-2)
LOSS = np.array([3.0, 2.0, 1.0, 0.5])


def comparison(name: str, *differences: float) -> Comparison:
    size = np.array(differences or [0.0] * len(LOSS))
    return Comparison(curves(name, LOSS * (1 + size)), size, size / 2, GATES)


@pytest.fixture(scope="module")
def figure() -> Any:
    right, wrong = comparison("right", 0, 0, 1e-4, 0), comparison("wrong", 0, 0, 0.5, 1e-6)
    return curves_figure([comparison("plain"), right, wrong])


def test_the_legend_has_every_run_and_its_verdict(figure: Any) -> None:
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ["plain (baseline)", "right (PASS)", "wrong (FAIL)"]


def test_curves_are_drawn_by_step(figure: Any) -> None:
    plain, _, wrong = figure.axes[0].lines
    assert (
        plain.get_xdata().tolist() == [1, 2, 3, 4] and plain.get_ydata().tolist() == LOSS.tolist()
    )
    assert wrong.get_ydata().tolist() == [3.0, 2.0, 1.5, pytest.approx(0.5)]
    assert [line.get_ydata().tolist() for line in figure.axes[1].lines] == [[1.0] * 4] * 3
    assert figure.axes[1].get_ylim()[0] == 0


def test_only_a_failed_run_is_dashed_and_in_its_color(figure: Any) -> None:
    for axes in figure.axes[:2]:
        assert [line.get_color() == FAILED for line in axes.lines] == [False, False, True]
        assert [line.is_dashed() for line in axes.lines] == [False, False, True]
    assert len({line.get_color() for line in figure.axes[0].lines}) == 3


@pytest.mark.parametrize(("panel", "times", "gate"), [(2, 1.0, 1e-3), (3, 0.5, 1e-2)])
def test_differences_are_drawn_beside_their_limit(
    figure: Any, panel: int, times: float, gate: float
) -> None:
    axes = figure.axes[panel]
    right, wrong, limit = axes.lines  # the baseline has no difference
    assert right.get_ydata().tolist() == [FLOOR, FLOOR, 1e-4 * times, FLOOR]
    assert wrong.get_ydata().tolist() == [FLOOR, FLOOR, 0.5 * times, 1e-6 * times]
    assert limit.get_ydata() == [gate, gate] and axes.get_yscale() == "log"


def test_many_runs_have_many_colors() -> None:
    """More than the distinct ones that there are."""
    runs = [comparison(str(i)) for i in range(12)]
    lines = curves_figure(runs).axes[0].lines
    assert len({str(line.get_color()) for line in lines}) == 12
