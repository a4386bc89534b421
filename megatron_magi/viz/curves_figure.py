"""Loss curves of runs, their differences from the baseline, and their speed."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_magi.training.parity.compare import Comparison
from megatron_magi.viz.style import INK, MUTED, new_figure, plain_panel, rank_colors, title

FLOOR = 1e-9
"""Smaller differences are drawn here: a logarithmic axis has no zero."""
FAILED = "#c0392b"


def curves_figure(comparisons: list[Comparison]) -> Any:
    """Four panels; the first comparison is the baseline with itself."""
    figure, ((loss, speed), (loss_gap, norm_gap)) = new_figure(2, 2, 11, 6.4)
    colors = [INK, *rank_colors(max(len(comparisons) - 1, 2))]
    for i, c in enumerate(comparisons):
        style: dict[str, Any] = {"linewidth": 5, "alpha": 0.25} if i == 0 else {"linewidth": 1.4}
        style["color"] = colors[i] if c.passed or not i else FAILED
        if i and not c.passed:
            style["linestyle"] = (0, (4, 2))
        steps = np.arange(1, len(c.run.loss) + 1)
        verdict = "baseline" if i == 0 else ("PASS" if c.passed else "FAIL")
        loss.plot(steps, c.run.loss, label=f"{c.run.name} ({verdict})", **style)
        speed.plot(steps, c.run.tokens_per_second, **style)
        if i:
            loss_gap.plot(steps, np.maximum(c.loss_difference, FLOOR), **style)
            norm_gap.plot(steps, np.maximum(c.grad_norm_difference, FLOOR), **style)
    gates = comparisons[0].gates
    for axes, gate in ((loss_gap, gates.any_step_loss), (norm_gap, gates.any_step_grad_norm)):
        axes.axhline(gate, color=MUTED, linewidth=1, linestyle=":")
        axes.annotate("threshold", (0.01, gate), (0, 3), ("axes fraction", "data"),
                      textcoords="offset points", color=MUTED, fontsize=8)  # fmt: skip
        axes.set_yscale("log")
        axes.set_xlabel("step", color=MUTED)
    loss.legend(frameon=False, labelcolor=INK)
    speed.set_ylim(bottom=0)
    for axes, text in (
        (loss, "lm loss (nats per token)"),
        (speed, "tokens per second"),
        (loss_gap, "|loss / baseline - 1|"),
        (norm_gap, "|grad norm / baseline - 1|"),
    ):
        title(axes, text)
        plain_panel(axes)
    return figure
