"""Deterministic weights keyed by parameter name: equal models in every parallel layout."""

from __future__ import annotations

from typing import Any


def init_by_name(model: Any, seed: int = 1234, std: float = 0.02) -> None:
    """Overwrite every parameter by its slice of a full weight drawn from (seed, global name).

    Global name: layer numbers counted over pipeline stages, expert numbers over expert ranks. Norm
    weights become 1, biases 0; matrices are normal(0, std). Tensor-parallel parameters get their
    slice; a gated linear_fc1 is sliced per half. Call it before the optimizer is built.

    Args:
        model: GPTModel or list of its chunks, DDP-wrapped or not, on every rank.

    Raises:
        ValueError: a parameter whose layout is not known.
    """
    raise NotImplementedError
