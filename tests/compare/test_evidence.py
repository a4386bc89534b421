"""A run's folder as evidence: its gradient errors, and what is not finite."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.compare.evidence import (
    Evidence,
    read_evidence,
)
from megatron_magi.compare.gradient_errors import Baseline, GradientError
from megatron_magi.compare.model_facts import ModelFacts
from tests.cli.compare_runs import PARAMETERS, write_beside_curve
from tests.compare.evidence import curves

NAN, INF = math.nan, math.inf


def test_a_run_is_measured_beside_the_baseline_and_the_baseline_is_not(tmp_path: Path) -> None:
    plain = write_beside_curve(tmp_path, "plain", gradients=0.0)
    other = write_beside_curve(tmp_path, "other", gradients=0.1)
    found = read_evidence(other, Baseline((plain,)))
    assert found.curves.name == "other" and found.model == ModelFacts("bf16", 384, 16 * 0.02**2)
    assert {e.parameter for e in found.gradients} == set(PARAMETERS)
    assert [e.relative_error for e in found.gradients] == pytest.approx([0.1] * len(PARAMETERS))
    assert read_evidence(plain, Baseline((plain,))).gradients == []


def test_every_kind_of_value_is_counted_if_it_is_not_finite() -> None:
    whole = curves("run", np.ones(3), validation={2: 1.0})
    assert Evidence(whole, None, []).num_not_finite == 0
    broken = curves("run", np.array([1.0, NAN, INF]), validation={2: NAN})
    broken.grad_norm[:] = 1.0, INF, 1.0
    gradients = [
        GradientError(1, "w", INF, 1.0, NAN, "plain"),
        GradientError(1, "b", 1, NAN, 1, "p"),
    ]
    assert Evidence(broken, None, gradients).num_not_finite == 2 + 1 + 1 + 3
