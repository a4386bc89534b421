"""The gradient with the largest error, in units of its noise."""

from __future__ import annotations

import math

import pytest

from megatron_magi.compare.noise_gates import worst_gradient
from megatron_magi.compare.run_error import RunError
from tests.compare.evidence import gradient_error

FLOOR = 1e-3


def test_the_worst_is_the_largest_in_units_of_its_own_noise() -> None:
    errors = [gradient_error("a", 0.3), gradient_error("b", 0.2), gradient_error("b", 0.1, 5)]
    noise = [gradient_error("a", 0.2), gradient_error("b", 0.05), gradient_error("b", 0.5, 5)]
    found = worst_gradient(errors, noise, FLOOR)
    assert found is not None
    ratio, text = found
    assert ratio == pytest.approx(4.0)
    assert text == "b at step 1: error 2.0e-01, noise 5.0e-02; worst of 3 gradients of steps [1, 5]"


def test_noise_below_the_floor_counts_as_the_floor() -> None:
    found = worst_gradient([gradient_error("a", 2e-3)], [gradient_error("a", 1e-9)], FLOOR)
    assert found is not None and found[0] == pytest.approx(2.0)
    assert "noise 1.0e-09, counted as 1.0e-03;" in found[1]


def test_only_iterations_of_both_runs_count() -> None:
    errors = [gradient_error("a", 0.9, 2), gradient_error("a", 0.1, 1)]
    noise = [gradient_error("a", 0.1, 1), gradient_error("a", 0.1, 3)]
    found = worst_gradient(errors, noise, FLOOR)
    assert found is not None and found[0] == pytest.approx(1.0)
    assert found[1].endswith("worst of 1 gradients of steps [1]")
    assert worst_gradient(errors[:1], noise, FLOOR) is None
    assert worst_gradient([], noise, FLOOR) is None and worst_gradient(errors, [], FLOOR) is None


def test_an_error_that_is_no_number_is_the_worst() -> None:
    errors = [gradient_error("a", 0.9), gradient_error("b", math.nan), gradient_error("c", 0.1)]
    noise = [gradient_error(name, 1e-6) for name in "abc"]
    found = worst_gradient(errors, noise, FLOOR)
    assert found is not None and math.isnan(found[0]) and found[1].startswith("b at step 1")


@pytest.mark.parametrize("lacks", ["noise", "run"])
def test_a_parameter_of_one_run_alone_is_refused(lacks: str) -> None:
    both = [gradient_error("a", 0.1), gradient_error("b", 0.1)]
    errors, noise = (both, both[:1]) if lacks == "noise" else (both[:1], both)
    with pytest.raises(RunError, match="the same parameters, got only one with b; save both"):
        worst_gradient(errors, noise, FLOOR)
