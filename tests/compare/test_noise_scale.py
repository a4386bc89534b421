"""Scales of noise: from neighbouring steps that are alike, and never below a rounding step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.compare.noise_floor import (
    gradient_floor,
    loss_floor,
    mean_scale,
    root_mean_square,
    standard_error,
)


@pytest.mark.parametrize("alike", [1, 20])
def test_the_standard_error_is_that_of_the_mean(alike: int) -> None:
    # 1: independent steps. 20: every 20 neighbours are equal, which one deviation over sqrt(n)
    # would count as 20 times as many independent ones.
    rng = np.random.default_rng(0)
    series = np.repeat(rng.normal(size=(2000, 400 // alike)), alike, axis=1)
    true = series.mean(axis=1).std()
    estimated = np.sqrt(np.mean([standard_error(x) ** 2 for x in series]))
    assert estimated == pytest.approx(true, rel=0.05)


@given(st.floats(-1, 1), st.integers(20, 70), st.integers(0, 1000))
def test_a_shift_moves_the_mean_and_not_its_error(shift: float, steps: int, seed: int) -> None:
    noise = np.random.default_rng(seed).normal(size=steps)
    assert standard_error(noise + shift) == pytest.approx(standard_error(noise))
    assert mean_scale(noise + shift) >= abs((noise + shift).mean())
    assert mean_scale(noise - noise.mean()) == pytest.approx(standard_error(noise))


def test_few_steps_have_no_standard_error() -> None:
    steps = np.arange(19.0)
    assert standard_error(steps) == 0.0 and standard_error(np.arange(20.0)) > 0
    assert mean_scale(steps) == 9.0


def test_one_small_number_of_several_does_not_make_the_scale_small() -> None:
    assert root_mean_square(np.array([3.0, 4.0, 0.0])) == pytest.approx(np.sqrt(25 / 3))


def test_floors_are_one_rounding_step() -> None:
    assert gradient_floor("bf16", 65536) == 2**-8
    assert gradient_floor("fp32", 65536) == 2**-24 * 256
    assert loss_floor("bf16", 65536) == 2**-8 / 256
    assert loss_floor("fp32", 65536) == 2**-23
