"""Functions that layout_worker runs on every rank of a world; JSON in, JSON out."""

from __future__ import annotations

from typing import Any

import tiny_llama


def train(**layout: Any) -> dict[str, list[float]]:
    """Train the tiny model in this layout."""
    return tiny_llama.train(tiny_llama.Layout(**layout))
