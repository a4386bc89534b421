"""Relative errors of dumped gradients."""

import math
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.compare.gradient_errors import Baseline, gradient_errors
from megatron_magi.compare.gradient_folder import (
    BLOCK,
    finish,
    gradient_path,
    write_gradient,
)
from megatron_magi.training.process.whole_files import partial_folder


def test_gradients_larger_than_a_block_are_measured_whole(tmp_path: Path) -> None:
    for name, change in (("a", 0.0), ("b", 3.0)):
        gradient = np.zeros(BLOCK + 5, np.float32)
        gradient[0], gradient[-1] = 4.0, change  # in the first block and in the second
        partial = partial_folder(gradient_path(tmp_path / name, 1))
        finish(partial, {"w": (gradient.shape, write_gradient(partial, "w", gradient))})
    (error,) = gradient_errors(tmp_path / "b", Baseline((tmp_path / "a",)))
    assert (error.norm, error.baseline_norm, error.relative_error) == (5.0, 4.0, 0.75)
    (error,) = gradient_errors(tmp_path / "a", Baseline((tmp_path / "b",)))
    assert error.relative_error == pytest.approx(0.6)


def test_a_gradient_of_zeros_has_an_error_of_zero_or_none_at_all(tmp_path: Path) -> None:
    for name, value in (("zero", 0.0), ("one", 1.0), ("zero_too", 0.0)):
        partial = partial_folder(gradient_path(tmp_path / name, 1))
        gradient = np.full(3, value, np.float32)
        finish(partial, {"w": ((3,), write_gradient(partial, "w", gradient))})
    assert (
        gradient_errors(tmp_path / "zero_too", Baseline((tmp_path / "zero",)))[0].relative_error
        == 0.0
    )
    assert (
        gradient_errors(tmp_path / "one", Baseline((tmp_path / "zero",)))[0].relative_error
        == math.inf
    )
