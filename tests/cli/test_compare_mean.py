"""`megatron-magi compare` beside the mean of several runs, which measure the noise themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_magi.compare.mean_floor import read_mean_floor
from megatron_magi.compare.noise_floor import NoiseGates
from megatron_magi.compare.positions import POSITIONS, Bucket
from megatron_magi.compare.run_error import RunError
from tests.cli.command import Capture, run
from tests.cli.compare_runs import CURVE, STEPS, write_beside_curve
from tests.compare.written_positions import write_positions

NOISE = 1e-4
GRADIENT = 0.01


def noisy(seed: int) -> Any:
    """Differences that begin at 0, as the first step's loss does."""
    return NOISE * np.random.default_rng(seed).standard_normal(STEPS) * (np.arange(STEPS) > 0)


def three(parent: Path, **more: Any) -> list[Path]:
    """Runs of a baseline."""
    return [
        write_beside_curve(parent, name, noisy(i), GRADIENT * (i + 1), **more)
        for i, name in enumerate(("p2p", "all_gather", "a2a"))
    ]


def judged(
    capsys: Capture, baseline: list[Path], folder: Path, *options: str
) -> tuple[int, dict[str, Any]]:
    """Exit code, and the gates of the first run by name."""
    means = [word for each in baseline for word in ("--mean-of", str(each))]
    arguments = ["compare", str(folder), *means, "--loss-drop", "4.9", *options]
    code, out, err = run(capsys, *arguments, "--json", "--no-figure")
    assert code in (0, 1), err
    return code, {gate["name"]: gate for gate in json.loads(out)["runs"][0]["gates"]}


def test_the_baseline_is_the_mean_and_noise_is_each_beside_the_others(tmp_path: Path) -> None:
    folders = three(tmp_path)
    losses = np.stack([CURVE * (1 + noisy(i)) for i in range(3)])
    floor = read_mean_floor(folders, NoiseGates())
    np.testing.assert_allclose(floor.baseline.curves.loss, losses.mean(0))
    assert floor.baseline.curves.name == "mean of a2a, all_gather, p2p"
    for i, noise in enumerate(floor.noises):
        expected = losses[i] / np.delete(losses, i, 0).mean(0)
        np.testing.assert_allclose(noise.curves.loss / floor.baseline.curves.loss, expected)
    # Gradients are ones with errors e, so one is off its two others' mean by e - mean(e).
    errors = GRADIENT * np.array([1, 2, 3])
    for i, noise in enumerate(floor.noises):
        others = np.delete(errors, i).mean()
        found = {e.relative_error for e in noise.gradients}
        assert max(found) == pytest.approx(abs(errors[i] - others), rel=1e-3)


def test_a_run_within_the_noise_passes_and_a_biased_one_fails(
    tmp_path: Path, capsys: Capture
) -> None:
    baseline = three(tmp_path)
    good = write_beside_curve(tmp_path, "magi", noisy(7), 2 * GRADIENT)
    code, gates = judged(capsys, baseline, good)
    assert code == 0 and gates["gradients"]["value"] == pytest.approx(0, abs=1e-3)
    biased = write_beside_curve(tmp_path, "biased", 1e-3 + noisy(8), 9 * GRADIENT)
    code, gates = judged(capsys, baseline, biased)
    assert code == 1
    assert {name for name in gates if gates[name]["passed"] is False} >= {"mean_bias", "gradients"}


def test_a_wrong_far_key_is_seen_by_position(tmp_path: Path, capsys: Capture) -> None:
    baseline = three(tmp_path)
    good = write_beside_curve(tmp_path, "magi", noisy(7), 2 * GRADIENT)
    bad = write_beside_curve(tmp_path, "far", noisy(9), 2 * GRADIENT)
    ends = [Bucket(STEPS, 0, 512), Bucket(STEPS, 512, 2048), Bucket(STEPS, 2048, 8192)]
    for i, folder in enumerate([*baseline, good, bad]):
        write_positions(folder, {b: 2 + 1e-3 * i for b in ends})
    write_positions(bad, {b: 2 + 0.2 * (b.first >= 2048) for b in ends})
    code, gates = judged(capsys, baseline, good)
    assert code == 0 and gates["positions"]["passed"]
    code, gates = judged(capsys, baseline, bad)
    assert code == 1 and "positions 2048 to 8192" in gates["positions"]["text"]


def test_the_first_steps_alone(tmp_path: Path, capsys: Capture) -> None:
    """A run that goes wrong later is right until then, with the gradients of these steps."""
    baseline = three(tmp_path)
    late = noisy(7) + 1e-2 * (np.arange(STEPS) >= 80)
    run_folder = write_beside_curve(tmp_path, "late", late, 2 * GRADIENT)
    assert judged(capsys, baseline, run_folder)[0] == 1
    code, gates = judged(capsys, baseline, run_folder, "--steps", "60")
    assert code == 0 and "of 60 steps" in gates["mean_bias"]["text"]
    assert gates["gradients"]["passed"] and gates["loss_drop"]["passed"] is None
    for steps in ("0", "-3"):
        assert "--steps must be at least 1" in run(capsys, "compare", "a", "b", "--steps", steps)[2]


def test_steps_that_a_run_does_not_have_are_refused(tmp_path: Path, capsys: Capture) -> None:
    runs = [write_beside_curve(tmp_path, f"r{i}", noisy(i), steps=60) for i in range(3)]
    longer = write_beside_curve(tmp_path, "longer", noisy(7))
    for ways in ([runs[0], runs[1]], [longer, runs[1], "--noise", runs[2]],
                 [longer, longer, "--noise", runs[2]], [runs[0], "--mean-of", runs[1],
                                                        "--mean-of", runs[2]]):  # fmt: skip
        command = ["compare", *map(str, ways), "--no-figure", "--steps", "80"]
        code, out, err = run(capsys, *command)
        assert (code, out) == (2, "") and "must have the 80 iterations of --steps, got 60" in err
        assert run(capsys, *command, "--allow-shorter")[0] < 2


def test_what_has_no_mean_is_refused(tmp_path: Path) -> None:
    first, second, third = three(tmp_path)
    with pytest.raises(RunError, match="two runs or more"):
        read_mean_floor([first, first], NoiseGates())
    shorter = write_beside_curve(tmp_path, "shorter", noisy(4), steps=STEPS - 10)
    with pytest.raises(RunError, match=r"same steps.*others in shorter than in p2p"):
        read_mean_floor([first, shorter], NoiseGates())
    floor = read_mean_floor([first, second, shorter], NoiseGates(), STEPS - 10)
    assert len(floor.baseline.curves.loss) == STEPS - 10
    same = write_beside_curve(tmp_path, "same", noisy(1))
    with pytest.raises(RunError, match="equal losses"):
        read_mean_floor([first, second, same], NoiseGates())
    broken = write_beside_curve(tmp_path, "broken", np.where(np.arange(STEPS) == 3, np.nan, 0.0))
    with pytest.raises(RunError, match=r"finite.*in broken"):
        read_mean_floor([first, broken], NoiseGates())
    (third / POSITIONS).write_text("iteration,first\n1,2\n")
    with pytest.raises(RunError, match="columns iteration, first, end and loss"):
        read_mean_floor([first, third], NoiseGates())


def test_other_options_beside_it(tmp_path: Path, capsys: Capture) -> None:
    p2p, a2a, _ = map(str, three(tmp_path))
    both = ["compare", p2p, "--mean-of", a2a, "--noise", a2a]
    assert "--noise has no effect with --mean-of" in run(capsys, *both)[2]
    twice = ["compare", p2p, "--mean-of", a2a, "--mean-of", p2p, "--no-figure"]
    assert "as both" in run(capsys, *twice)[2]
