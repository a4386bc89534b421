"""The parts of a memory record's row, for the screen and for the page."""

from __future__ import annotations

from typing import Any


def parts(row: dict[str, Any]) -> list[tuple[int, int]]:
    """(estimated, measured) bytes: weights and gradients, optimizer, what a step adds, peak."""
    e, m = row["estimate"], row["measured"]
    held = e["weights"] + e["gradients"]
    step = m["peak_step"] - m["weights_and_gradients"] - m["optimizer"]
    return [
        (held, m["weights_and_gradients"]),
        (e["optimizer"], m["optimizer"]),
        (e["total"] - held - e["optimizer"], step),
        (e["total"], m["peak"]),
    ]
