"""Relative errors of saved gradients."""

import math
from pathlib import Path

import pytest
import torch

from megatron_magi.compare import gradient_errors as module
from megatron_magi.compare.gradient_errors import Baseline, gradient_errors
from tests.compare.saved_gradients import save_gradients


def test_gradients_larger_than_a_block_are_measured_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", 4)
    for name, change in (("a", 0.0), ("b", 3.0)):
        gradient = torch.zeros(9)
        gradient[0], gradient[-1] = 4.0, change  # in the first block and in the third
        save_gradients(tmp_path / name, 1, {"w": gradient})
    (error,) = gradient_errors(tmp_path / "b", Baseline((tmp_path / "a",)))
    assert (error.norm, error.baseline_norm, error.relative_error) == (5.0, 4.0, 0.75)
    (error,) = gradient_errors(tmp_path / "a", Baseline((tmp_path / "b",)))
    assert error.relative_error == pytest.approx(0.6)


def test_squares_beyond_single_precision_are_summed_in_double(tmp_path: Path) -> None:
    for name, value in (("a", 3e30), ("b", 6e30)):
        save_gradients(tmp_path / name, 1, {"w": torch.full((9,), value)})
    (error,) = gradient_errors(tmp_path / "b", Baseline((tmp_path / "a",)))
    assert (error.norm, error.relative_error) == (pytest.approx(18e30, rel=1e-7), 1.0)


def test_a_gradient_of_zeros_has_an_error_of_zero_or_none_at_all(tmp_path: Path) -> None:
    for name, value in (("zero", 0.0), ("one", 1.0), ("zero_too", 0.0)):
        save_gradients(tmp_path / name, 1, {"w": torch.full((3,), value)})
    for name, expected in (("zero_too", 0.0), ("one", math.inf)):
        (error,) = gradient_errors(tmp_path / name, Baseline((tmp_path / "zero",)))
        assert error.relative_error == expected
