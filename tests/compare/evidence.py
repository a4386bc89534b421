"""Runs as values, for tests of the gates that judge them."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_magi.compare.differences import Curve, RunCurves
from megatron_magi.compare.gradient_errors import GradientError


def curves(name: str, loss: Curve, **more: Any) -> RunCurves:
    """A run with these losses; everything else of it is ones."""
    ones = np.ones(len(loss))
    return RunCurves(name, np.asarray(loss, float), ones, ones, ones, **more)


def gradient_error(parameter: str, relative: float, iteration: int = 1) -> GradientError:
    return GradientError(iteration, parameter, 1.0, 1.0, relative, "plain")
