"""The lower panel of a comparison: its axis has numbers whatever the noise is."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_magi.viz.curves_figure import _Line, _round_above, _scale


@pytest.mark.parametrize(
    ("x", "above"), [(0.22, 0.3), (0.3, 0.3), (1.0, 1.0), (0.051, 0.1), (4.0, 5.0), (7e-5, 1e-4)]
)
def test_the_next_round_number(x: float, above: float) -> None:
    assert _round_above(x) == pytest.approx(above)


def test_a_quiet_run_has_ticks_beside_0() -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    axes.plot([0, 1], [-0.01, 0.02])

    values = np.array([-0.01, 0.02])
    _scale(axes, 0.22, [_Line("quiet", np.arange(2), values, {})])
    axes.autoscale_view()  # as the lines that are drawn next ask for
    low, high = axes.get_ylim()
    shown = sorted(t for t in axes.get_yticks() if low - 1e-9 <= t <= high + 1e-9)
    assert shown == pytest.approx([-0.3, -0.15, 0, 0.15, 0.3])
