"""Noise runs as the measure: what several of them say together, and which are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_magi.compare.evidence import Evidence, ModelFacts
from megatron_magi.compare.gradient_errors import GradientError
from megatron_magi.compare.noise_floor import (
    TRUSTED_STEPS,
    NoiseFloor,
    NoiseGates,
    read_noise_floor,
)
from megatron_magi.compare.run_error import RunError
from tests.cli.compare_runs import write_steps
from tests.compare.evidence import curves, gradient_error


def floor(*noises: Evidence, recipe: ModelFacts | None = None, **gates: float) -> NoiseFloor:
    baseline = Evidence(curves("plain", np.ones(30), loss_tokens=4096), recipe, [])
    return NoiseFloor(baseline, noises, NoiseGates(**gates))


def noise(name: str, steps: int, *gradients: GradientError) -> Evidence:
    return Evidence(curves(name, np.ones(steps)), None, list(gradients))


def test_curves_are_those_of_the_longest_runs() -> None:
    found = floor(noise("a", 30), noise("short", 29), noise("b", 30)).noise_curves
    assert [run.name for run in found] == ["a", "b"]


def test_a_gradients_noise_is_the_largest_of_all_runs() -> None:
    """Of each parameter in each iteration on its own; also from runs that are short."""
    long = noise("long", 30, gradient_error("w", 0.1), gradient_error("w", 0.5, iteration=20))
    short = noise("short", 1, gradient_error("w", 0.3), gradient_error("b", 0.2))
    found = {
        (e.iteration, e.parameter): e.relative_error for e in floor(long, short).noise_gradients
    }
    assert found == {(1, "w"): 0.3, (20, "w"): 0.5, (1, "b"): 0.2}
    swapped = {
        (e.iteration, e.parameter): e.relative_error for e in floor(short, long).noise_gradients
    }
    assert swapped == found


def test_floors_follow_the_baselines_recipe() -> None:
    """Without one, the smaller floors: they pass fewer runs."""
    bf16 = floor(noise("n", 30), recipe=ModelFacts("bf16", 384, 0.1))
    assert (bf16.dtype, bf16.gradient_floor, bf16.loss_floor) == ("bf16", 2**-8, 2**-8 / 64)
    fp16 = floor(noise("n", 30), recipe=ModelFacts("fp16", 384, 0.1))
    assert (fp16.gradient_floor, fp16.loss_floor) == (2**-11, 2**-11 / 64)
    unknown = floor(noise("n", 30))
    assert (unknown.dtype, unknown.gradient_floor, unknown.loss_floor) == ("fp32", 2**-18, 2**-23)


@pytest.mark.parametrize("given", [0.25, 0.0])
def test_a_gradient_floor_that_is_given_counts(given: float) -> None:
    assert floor(noise("n", 30), gradient_floor=given).gradient_floor == given


def write(folder: Path, losses: list[float]) -> Path:
    write_steps(folder, [
        {"iteration": i + 1, "lm_loss": loss, "grad_norm": 1.0, "tokens_per_second": 1.0}
        for i, loss in enumerate(losses)
    ])  # fmt: skip
    return folder


FALLING = [5.0 - 0.1 * i for i in range(TRUSTED_STEPS + 2)]


def test_runs_are_read_in_their_order(tmp_path: Path) -> None:
    names = ("plain", "reversed", "flex")
    folders = [write(tmp_path / n, [x + i / 100 for x in FALLING]) for i, n in enumerate(names)]
    found = read_noise_floor(folders[0], folders[1:], NoiseGates(noise_ratio=3.0))
    assert found.baseline.curves.name == "plain" and found.gates.noise_ratio == 3.0
    assert [n.curves.name for n in found.noises] == ["reversed", "flex"]


def test_the_baseline_itself_is_no_noise(tmp_path: Path) -> None:
    """By another name for its folder, however few steps it has."""
    plain = write(tmp_path / "plain", FALLING[:2])
    (tmp_path / "link").symlink_to(plain)
    for folder in (plain, tmp_path / "link", plain / ".." / "plain"):
        with pytest.raises(RunError, match=r"must differ by rounding"):
            read_noise_floor(plain, [folder], NoiseGates())


@pytest.mark.parametrize("steps", [TRUSTED_STEPS - 1, TRUSTED_STEPS])
@pytest.mark.parametrize("whose", ["baseline", "noise"])
def test_equal_losses_are_one_run_if_there_are_enough(
    steps: int, whose: str, tmp_path: Path
) -> None:
    """A few first losses may well be equal: rounding grows with the steps."""
    lengths = (steps, None) if whose == "baseline" else (None, steps)
    plain = write(tmp_path / "plain", FALLING[: lengths[0]])
    again = write(tmp_path / "again", FALLING[: lengths[1]])
    if steps < TRUSTED_STEPS:
        assert len(read_noise_floor(plain, [again], NoiseGates()).noises) == 1
        return
    with pytest.raises(RunError, match=r"got equal losses in .*plain and .*again; train one"):
        read_noise_floor(plain, [again], NoiseGates())


def test_one_other_loss_is_noise_enough(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", FALLING)
    other = write(tmp_path / "other", [*FALLING[:-1], FALLING[-1] * (1 + 1e-6)])
    assert len(read_noise_floor(plain, [other], NoiseGates()).noises) == 1
    same = write(tmp_path / "same", FALLING)
    with pytest.raises(RunError, match=r"same; train one with another kernel"):
        read_noise_floor(plain, [other, same], NoiseGates())


@pytest.mark.parametrize("role, name", [("baseline", "plain"), ("noise run", "other")])
def test_nothing_is_measured_with_values_that_are_not_finite(
    role: str, name: str, tmp_path: Path
) -> None:
    for folder in ("plain", "other"):
        shift = 0.01 if folder == "other" else 0.0
        losses = [x + shift for x in FALLING]
        if folder == name:
            losses[3:5] = [float("nan"), float("inf")]
        write(tmp_path / folder, losses)
    text = rf"the {role} must be finite, got 2 values that are inf or nan in {name}; train it"
    with pytest.raises(RunError, match=text):
        read_noise_floor(tmp_path / "plain", [tmp_path / "other"], NoiseGates())
