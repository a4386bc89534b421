"""compare: each gate fails alone, controls are caught, and speed judges nothing."""

import csv
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_magi.training.run.gradient_folder import (
    BLOCK,
    finish,
    gradient_path,
    open_partial,
    write_gradient,
)
from megatron_magi.training.run.step_record import StepRecord
from tests.cli.command import Capture, run

STEPS = 120
VOCABULARY = 384  # 257 tokens, padded to a multiple of 128
CURVE = 1.0 + (math.log(VOCABULARY) - 1.0) * np.exp(-np.arange(STEPS) / 20)
"""Starts at ln(vocabulary) and falls by 4.94 nats."""
NOISE = 1e-4 * np.random.default_rng(0).normal(size=STEPS)
ONE_STEP = 2.0**-8
"""Noise of a bf16 gradient is at least this."""
PARAMETERS = ("embedding.weight", "decoder.layers.0.weight", "decoder.layers.10.weight")
Write = Callable[..., Path]


def write_steps(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    with (folder / "steps.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, [f.name for f in fields(StepRecord)])
        lines.writeheader()
        lines.writerows(dict.fromkeys(lines.fieldnames, 0) | {"validation_loss": ""} | row
                        for row in rows)  # fmt: skip


# Without a noise run


def write_run(
    folder: Path, noise: float, steps: int = 12, speed: float = 1000.0, **more: Any
) -> str:
    write_steps(folder, [
        {"iteration": i, "lm_loss": (2 + math.exp(-i)) * (1 + noise * i),
         "grad_norm": (1 + 1 / i) * (1 + noise), "step_seconds": 1.0,
         "tokens_per_second": speed * (0.1 if i == 1 else 1)} | more
        for i in range(1, steps + 1)
    ])  # fmt: skip
    return str(folder)


def test_compare_passes_and_fails(capsys: Capture, tmp_path: Path) -> None:
    baseline, right, wrong = (write_run(tmp_path / n, noise, speed=speed) for n, noise, speed in (
        ("dense", 0.0, 1000.0), ("magi", 1e-6, 2500.0), ("moved", 1e-3, 2500.0)))  # fmt: skip
    stem = tmp_path / "pictures" / "compare"
    code, out, _ = run(capsys, "compare", baseline, right, "--out", str(stem))
    assert code == 0 and "baseline" in out and "PASS" in out
    assert stem.with_suffix(".png").exists() and "FAIL" not in stem.with_suffix(".svg").read_text()
    code, out, _ = run(capsys, "compare", baseline, right, wrong, "-q", "--no-figure")
    assert (code, out) == (1, "PASS magi\nFAIL moved\n")
    loose = ["--first-step", "0.1", "--any-loss", "0.1", "--any-grad-norm", "0.1"]
    code, out, _ = run(capsys, "compare", baseline, wrong, "--json", "--no-figure", *loose)
    facts = json.loads(out)
    assert code == 0 and facts["passed"] and facts["baseline"] == "dense"
    assert facts["thresholds"]["any_step_loss"] == 0.1
    assert facts["runs"][1]["worst_loss_difference"] == pytest.approx(12e-3)
    assert facts["runs"][1]["tokens_per_second"] == 2500


def test_plain_controls_must_fail(capsys: Capture, tmp_path: Path) -> None:
    baseline, right, wrong = (write_run(tmp_path / n, noise) for n, noise in (
        ("dense", 0.0), ("magi", 1e-6), ("moved", 1e-3)))  # fmt: skip
    end = ("--no-figure", "-q")
    code, out, _ = run(capsys, "compare", baseline, right, "--expect-fail", wrong, *end)
    assert (code, out) == (0, "PASS magi\nCAUGHT moved\n")
    code, out, _ = run(capsys, "compare", baseline, right, "--expect-fail", right, *end)
    assert (code, out) == (1, "PASS magi\nNOT CAUGHT magi\n")
    code, out, _ = run(capsys, "compare", baseline, "--expect-fail", wrong, *end)
    assert (code, out) == (0, "CAUGHT moved\n")


def test_runs_of_unequal_length_are_not_compared(capsys: Capture, tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a", 0), write_run(tmp_path / "b", 0, steps=9)
    code, _, err = run(capsys, "compare", first, second, "--no-figure")
    assert code == 2 and "equally long, got 9 iterations of b and 12 of a" in err
    assert "--allow-shorter" in err
    code, out, _ = run(capsys, "compare", first, second, "--no-figure", "--allow-shorter", "-q")
    assert (code, out) == (0, "PASS b\n")
    code, _, err = run(capsys, "compare", second, first, "--no-figure", "--allow-shorter")
    assert code == 2 and "equally long, got 12 iterations of a" in err


def test_runs_that_begin_elsewhere_are_not_compared(capsys: Capture, tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", 0, steps=3)
    write_steps(tmp_path / "b", [{"iteration": i, "lm_loss": 2, "grad_norm": 1} for i in (5, 6, 7)])
    write_steps(tmp_path / "c", [{"iteration": i, "lm_loss": 2, "grad_norm": 1} for i in (1, 2, 4)])
    code, _, err = run(capsys, "compare", first, str(tmp_path / "b"), "--no-figure")
    assert code == 2 and "begin at one iteration, got 5 of b and 1 of a" in err
    code, _, err = run(capsys, "compare", first, str(tmp_path / "c"), "--no-figure")
    assert code == 2 and "one after the other, got gaps" in err


@pytest.mark.parametrize(
    ("whole", "broken", "text"),
    [
        ("lm_loss", "loss", "KeyError('lm_loss')"),
        ("3,2.0497", "three,2.0497", "'three'"),
        (",1000.0,0,0,0,0,0,\r\n4,", "\r\n4,", "NoneType"),
    ],
    ids=["column", "number", "cut_line"],
)
def test_a_broken_steps_csv_is_refused_by_name(
    capsys: Capture, tmp_path: Path, whole: str, broken: str, text: str
) -> None:
    first, second = (write_run(tmp_path / name, 0) for name in "ab")
    path = Path(second) / "steps.csv"
    content = path.read_bytes().decode()
    assert whole in content
    path.write_bytes(content.replace(whole, broken).encode())
    code, _, err = run(capsys, "compare", first, second, "--no-figure")
    assert code == 2 and err.count("\n") == 1
    assert "a steps.csv must have the columns and numbers" in err
    assert text in err and str(path) in err


def test_a_figure_that_cannot_be_written_is_one_sentence(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws the figure")
    first, second = (write_run(tmp_path / name, 0) for name in "ab")
    (tmp_path / "file").touch()
    code, _, err = run(capsys, "compare", first, second, "--out", str(tmp_path / "file" / "x"))
    assert code == 2 and err.count("\n") == 1 and "pass another --out or --no-figure" in err


def test_speed_says_what_it_is_and_changes_no_verdict(capsys: Capture, tmp_path: Path) -> None:
    baseline = write_run(tmp_path / "dense", 0, speed=1000, num_processes=2)
    slow = write_run(tmp_path / "slow", 0, speed=10, num_processes=2)
    wide = write_run(tmp_path / "wide", 0, speed=3000, num_processes=4)
    code, out, _ = run(capsys, "compare", baseline, slow, wide, "--no-figure")
    assert code == 0 and "it does not change the verdict" in out
    lines = {line.split()[0]: line for line in out.split("speed:")[1].splitlines()[1:]}
    assert lines["slow"].endswith(
        "10 tokens/s, 5 per process on 2 processes; 0.01 times the baseline's median tokens/s; "
        "measured on 2 processes each"
    )
    assert "750 per process on 4 processes; 3.00 times" in lines["wide"]
    assert "NOT the same number of processes: 4, the baseline 2" in lines["wide"]


# With a noise run


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a run of `STEPS` steps beside the curve; relative differences and gradient errors."""

    def write(
        name: str,
        difference: Any = 0.0,
        gradients: dict[str, float] | float | None = None,
        steps: int = STEPS,
        validation: Any = 0.0,
        **recipe: str,
    ) -> Path:
        folder = tmp_path / name
        loss = CURVE * (1 + np.broadcast_to(difference, STEPS))
        validated = CURVE + np.broadcast_to(validation, STEPS)
        write_steps(folder, [
            {"iteration": i + 1, "lm_loss": loss[i], "grad_norm": 1.0, "tokens_per_second": 1000.0,
             "num_processes": 2, "loss_tokens": 4096,
             "validation_loss": validated[i] if (i + 1) % 40 == 0 else ""}
            for i in range(steps)
        ])  # fmt: skip
        facts = {
            "vocab_size": "257", "vocab_multiple": "128", "hidden_size": "16", "dtype": "bf16"
        } | recipe  # fmt: skip
        model = ", ".join(f"{name}: {value}" for name, value in facts.items() if name != "dtype")
        (folder / "recipe.yaml").write_text(
            f"model: {{{model}}}\ntrain: {{dtype: {facts['dtype']}}}\n"
        )
        if gradients is not None:
            dump(folder, gradients)
        return folder

    return write


def dump(folder: Path, errors: dict[str, float] | float, iteration: int = 1) -> None:
    """Gradients of ones, with these relative L2 errors."""
    partial = open_partial(folder, iteration)
    norms: dict[str, Any] = {}
    for name in PARAMETERS:
        error = errors.get(name, 0.0) if isinstance(errors, dict) else errors
        gradient = np.ones((4, 8), np.float32)
        gradient[::2] *= 1 + error
        gradient[1::2] *= 1 - error
        norms[name] = (gradient.shape, write_gradient(partial, name, gradient))
    finish(partial, norms)


@pytest.fixture
def family(write: Write) -> tuple[str, str]:
    """Baseline and noise run, with gradients of step 1."""
    baseline = write("plain", gradients=0.0)
    noise = write("reversed", NOISE, gradients={PARAMETERS[0]: 0.1}, validation=1e-4)
    return str(baseline), str(noise)


def judge(
    capsys: Capture, family: tuple[str, str], run_folder: Path, *options: str
) -> tuple[int, dict[str, Any]]:
    """Exit code, and the JSON with the run's gates by name under "gates"."""
    drop = () if "--loss-drop" in options else ("--loss-drop", "4.9")
    arguments = ["compare", family[0], str(run_folder), "--noise", family[1], *drop, *options]
    code, out, err = run(capsys, *arguments, "--json", "--no-figure")
    assert code in (0, 1), err
    facts = json.loads(out)
    facts["gates"] = {g["name"]: g for g in facts["runs"][0]["gates"]}
    return code, facts


def failed(facts: dict[str, Any]) -> list[str]:
    return [name for name, g in facts["gates"].items() if g["passed"] is False]


ODD = NOISE[::-1].copy()
"""Differences of the noise's size in another order, and at step 1 none."""
ODD[0] = 0.0
SIGNS = np.where(np.arange(STEPS) % 2, 1.0, -1.0)


def test_a_right_run_passes_every_gate(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    right = write("magi", ODD, gradients={PARAMETERS[1]: ONE_STEP, PARAMETERS[0]: 0.2})
    code, facts = judge(capsys, family, right)
    assert (code, facts["passed"], failed(facts)) == (0, True, [])
    assert [g for g in facts["gates"].values() if g["passed"] is None] == []
    assert facts["gates"]["gradients"]["value"] == pytest.approx(2.0, rel=1e-5)
    assert facts["gradient_floor"] == ONE_STEP and facts["thresholds"]["noise_ratio"] == 2


def at_the_end(size: float) -> Any:
    """Too high in the last 20 steps and too low in 20 before the last 50: right in the mean."""
    steps = np.arange(STEPS)
    return ODD + size * (steps >= STEPS - 20) - size * ((steps >= 30) & (steps < 50))


@pytest.mark.parametrize(
    "gate, options",
    [
        ("step_1_loss", {"difference": np.where(np.arange(STEPS) == 0, 2e-4, ODD)}),
        ("gradients", {"gradients": {PARAMETERS[2]: 3.1 * ONE_STEP}}),
        ("gradients", {"gradients": {PARAMETERS[0]: 0.31}}),
        # Up and down by turns: a large difference without a bias.
        ("mean_loss", {"difference": np.where(np.arange(STEPS) == 0, 0, 3e-4 * SIGNS)}),
        # Always up and less than the noise's size: a bias without a large difference.
        ("mean_bias", {"difference": np.where(np.arange(STEPS) < 70, 9e-5, ODD)}),
        ("last_steps", {"difference": at_the_end(1.5e-4)}),
        ("validation", {"validation": 3e-4}),
        ("loss_start", {"vocab_size": "600"}),
        ("loss_start", {"hidden_size": "3072"}),  # 0.6 nats more from the logits' variance
    ],
    ids=["step_1", "one_rounding_step", "3x_noise", "size", "bias", "end", "validation", "start",
         "start_of_wide_model"],
)  # fmt: skip
def test_each_gate_fails_alone(
    capsys: Capture,
    family: tuple[str, str],
    write: Write,
    gate: str,
    options: dict[str, Any],
) -> None:
    wrong = write("wrong", **{"difference": ODD, "gradients": 0.0} | options)
    code, facts = judge(capsys, family, wrong)
    assert (code, facts["passed"], failed(facts)) == (1, False, [gate])
    assert facts["gates"][gate]["ratio"] > 1
    assert run(capsys, "compare", family[0], str(wrong), "--noise", family[1], "-q", "--no-figure",
               "--loss-drop", "4.9")[1] == "FAIL wrong\n"  # fmt: skip


def test_runs_that_learn_too_little_fail(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    code, facts = judge(capsys, family, write("magi", ODD, gradients=0.0), "--loss-drop", "5")
    assert (code, failed(facts)) == (1, ["loss_drop"])
    assert facts["gates"]["loss_drop"]["value"] == pytest.approx(4.93, abs=0.02)


def test_mean_loss_has_a_limit_however_large_the_noise(capsys: Capture, write: Write) -> None:
    family = str(write("plain")), str(write("reversed", 50 * NOISE))
    right = write("magi", np.where(np.arange(STEPS) == 0, 0, 0.0026 * SIGNS))
    code, facts = judge(capsys, family, right)
    assert (code, failed(facts)) == (1, ["mean_loss"])
    assert facts["gates"]["mean_loss"]["limit"] == 0.0025
    assert judge(capsys, family, right, "--mean-loss", "0.003")[0] == 0


def test_several_noise_runs_count_together(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    biased = write("magi", np.where(np.arange(STEPS) < 70, 9e-5, ODD), gradients=0.0)
    code, facts = judge(capsys, family, biased)
    alone = facts["gates"]["mean_bias"]
    assert (code, failed(facts)) == (1, ["mean_bias"])
    other = np.where(np.arange(STEPS) < 70, -9e-5, ODD)
    second = write("plain_sdpa", other)
    code, facts = judge(capsys, family, biased, "--noise", str(second))
    both = facts["gates"]["mean_bias"]
    assert (code, failed(facts)) == (0, [])
    assert [n["name"] for n in facts["noise"]] == ["reversed", "plain_sdpa"]
    # The second run's own scale is its bias; the limit takes the root mean square of the two.
    scales = [alone["limit"] / 2, abs(other.mean())]
    assert both["limit"] == pytest.approx(2 * float(np.sqrt(np.mean(np.square(scales)))), rel=1e-2)


def test_a_run_is_not_its_own_noise(capsys: Capture, family: tuple[str, str]) -> None:
    code, _, err = run(capsys, "compare", *family, "--noise", family[1], "--no-figure")
    assert code == 2 and "got" in err and "reversed as both" in err


def test_a_short_noise_run_measures_gradients_alone(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    wrong = write("magi", ODD, gradients={PARAMETERS[2]: 3.1 * ONE_STEP})
    assert failed(judge(capsys, family, wrong)[1]) == ["gradients"]
    short = write("plain_sdpa", ODD, gradients={PARAMETERS[2]: 2 * ONE_STEP}, steps=1)
    code, facts = judge(capsys, family, wrong, "--noise", str(short))
    assert (code, failed(facts)) == (0, [])
    assert "of 120 steps" in facts["gates"]["mean_loss"]["text"]
    assert facts["gates"]["gradients"]["value"] == pytest.approx(3.1 / 2, rel=1e-3)


def test_less_noise_than_one_rounding_step_is_not_believed(capsys: Capture, write: Write) -> None:
    # One bf16 rounding of 4,096 losses: 6.1e-5 of a step's mean, 5.6e-6 of a mean of 120 steps.
    family = str(write("plain")), str(write("reversed", 1e-12 * NOISE))
    assert judge(capsys, family, write("magi", 0.9e-5))[0] == 0
    code, facts = judge(capsys, family, write("wrong", 2.5e-5))
    assert (code, failed(facts)) == (1, ["mean_bias", "last_steps"])
    assert facts["loss_floor"] == 2**-8 / 64


def test_one_validation_that_happens_to_agree_is_not_the_noise(
    capsys: Capture, write: Write
) -> None:
    agrees_at_last = np.where(np.arange(STEPS) < 100, 1e-3, 0.0)
    family = str(write("plain")), str(write("reversed", NOISE, validation=agrees_at_last))
    code, facts = judge(capsys, family, write("magi", ODD, validation=1e-3))
    assert code == 0
    assert facts["gates"]["validation"]["limit"] == pytest.approx(2 * 1e-3 * math.sqrt(2 / 3))


def test_the_worst_parameter_is_named(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    # The largest error is not the worst: its noise is larger.
    wrong = write("wrong", ODD, {PARAMETERS[0]: 0.29, PARAMETERS[1]: 0.02, PARAMETERS[2]: 0.01})
    code, out, _ = run(capsys, "compare", family[0], str(wrong), "--noise", family[1],
                       "--no-figure", "--loss-drop", "4.9")  # fmt: skip
    (line,) = [text for text in out.splitlines() if "FAIL  gradients" in text]
    assert code == 1 and f"{PARAMETERS[1]} at step 1: error 2.0e-02, noise 0.0e+00" in line
    assert "counted as 3.9e-03" in line and "5.12 <= 3" in line
    code, facts = judge(capsys, family, wrong, "--gradient-floor", "0.01")
    assert code == 0 and facts["gates"]["gradients"]["value"] == pytest.approx(2.9, rel=1e-5)
    assert judge(capsys, family, wrong, "--gradient-ratio", "6")[0] == 0


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("where", ["loss", "gradient", "validation"])
def test_inf_and_nan_fail(
    capsys: Capture, family: tuple[str, str], write: Write, bad: str, where: str
) -> None:
    difference, gradients, validation = ODD.copy(), {PARAMETERS[0]: 0.0}, 0.0
    if where == "loss":
        difference[30] = float(bad)
    elif where == "gradient":
        gradients[PARAMETERS[2]] = float(bad)
    else:
        validation = float(bad)
    wrong = write("wrong", difference, gradients, validation=validation)
    code, facts = judge(capsys, family, wrong)
    assert code == 1 and "finite" in failed(facts)
    other = {"loss": "mean_loss", "gradient": "gradients", "validation": "validation"}[where]
    assert other in failed(facts)
    assert facts["gates"][other]["value"] is None  # JSON has no nan


@pytest.mark.parametrize("role", [0, 1], ids=["baseline", "noise"])
def test_nothing_is_measured_with_inf_and_nan(capsys: Capture, write: Write, role: int) -> None:
    broken = NOISE.copy()
    broken[7] = np.nan
    family = [str(write("plain", broken if role == 0 else 0.0)),
              str(write("reversed", broken if role else NOISE))]  # fmt: skip
    code, _, err = run(capsys, "compare", family[0], str(write("magi")), "--noise", family[1])
    assert code == 2 and "must be finite, got 1 values" in err


def test_short_controls_skip_what_needs_more_steps(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    right = write("magi", ODD, gradients=0.0)
    control = write("moved", ODD, gradients={PARAMETERS[1]: 0.3}, steps=15)
    options = ("--expect-fail", str(control))
    arguments = ("compare", family[0], str(right), "--noise", family[1], "--loss-drop", "4.9",
                 "--no-figure", *options)  # fmt: skip
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "got 15 iterations of moved and 120 of plain" in err
    code, out, _ = run(capsys, *arguments, "--allow-shorter")
    assert code == 0
    assert (
        "moved: CAUGHT by gradients (skipped: mean_loss, mean_bias, last_steps, validation, "
        "loss_drop)" in out
    )
    assert "magi: PASS\n" in out
    code, out, _ = run(capsys, *arguments, "--allow-shorter", "-q")
    assert (code, out) == (0, "PASS magi\nCAUGHT by gradients moved\n")


def test_a_control_that_nothing_tells_from_the_baseline_is_not_caught(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    right = write("magi", ODD, gradients=0.0)
    control = write("moved", ODD, gradients=0.0, vocab_size="600")  # fails loss_start alone
    code, facts = judge(capsys, family, right, "--expect-fail", str(control))
    assert code == 1 and facts["runs"][0]["passed"]
    assert facts["controls"][0]["passed"] is False and facts["controls"][0]["caught_by"] == []


def test_a_failing_run_is_not_saved_by_a_caught_control(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    wrong = write("wrong", ODD, gradients=0.5)
    assert judge(capsys, family, wrong, "--expect-fail", str(wrong))[0] == 1


# Errors that travel as CSV


def test_errors_travel_where_gradients_do_not(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    wrong = write("wrong", ODD, gradients={PARAMETERS[2]: 0.02})
    code, with_gradients = judge(capsys, family, wrong)
    with (wrong / "gradient_errors.csv").open(newline="") as file:
        rows = {r["parameter"]: r for r in csv.DictReader(file)}
    assert rows[PARAMETERS[2]]["iteration"] == "1" and rows[PARAMETERS[2]]["baseline"] == "plain"
    assert float(rows[PARAMETERS[2]]["relative_error"]) == pytest.approx(0.02, rel=1e-5)
    assert float(rows[PARAMETERS[2]]["norm"]) == pytest.approx(np.sqrt(32 * 1.0004), rel=1e-6)
    assert float(rows[PARAMETERS[2]]["baseline_norm"]) == pytest.approx(np.sqrt(32), rel=1e-6)
    for folder in (*family, wrong):
        shutil.rmtree(Path(folder) / "gradients")
    code_without, without = judge(capsys, family, wrong)
    assert code == code_without == 1
    assert with_gradients["gates"]["gradients"] == without["gates"]["gradients"]


def test_a_later_dump_joins_the_measured_ones(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    right = write("magi", ODD, gradients=0.01)
    for folder in (*map(Path, family), right):
        dump(folder, 0.0, iteration=80)
    dump(Path(family[1]), 0.04, iteration=80)
    code, facts = judge(capsys, family, right)
    assert facts["gates"]["gradients"]["text"].endswith("worst of 6 gradients of steps [1, 80]")
    shutil.rmtree(gradient_path(right, 1))
    dump(right, 0.13, iteration=80)
    code, facts = judge(capsys, family, right)
    gate = facts["gates"]["gradients"]
    assert code == 1 and gate["value"] == pytest.approx(3.25, rel=1e-5)
    assert "at step 80: error 1.3e-01, noise 4.0e-02; worst of 6" in gate["text"]


def test_errors_against_another_baseline_are_refused(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    right = write("magi", ODD, gradients=0.0)
    judge(capsys, family, right)
    shutil.rmtree(right / "gradients")
    other = write("other", gradients=0.0)
    code, _, err = run(capsys, "compare", str(other), str(right), "--noise", family[1])
    assert code == 2 and "must hold errors against other, got plain" in err
    path = right / "gradient_errors.csv"
    path.write_text(path.read_text().replace("baseline", "reference"))
    assert run(capsys, "compare", family[0], str(right), "--noise", family[1])[0] != 2
    path.write_text(path.read_text().replace("relative_error", "error"))
    code, _, err = run(capsys, "compare", family[0], str(right), "--noise", family[1])
    assert code == 2 and f"got KeyError('relative_error') in {path}; remove it" in err


def test_other_parameters_are_refused(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    wrong = write("wrong", ODD, gradients=0.0)
    partial = open_partial(wrong, 1)
    finish(partial, {"w": ((3,), write_gradient(partial, "w", np.ones(3, np.float32)))})
    code, _, err = run(capsys, "compare", family[0], str(wrong), "--noise", family[1])
    assert code == 2 and "must be of one model, got another decoder.layers.0.weight" in err


def test_gradients_larger_than_a_block_are_measured_whole(tmp_path: Path) -> None:
    from megatron_magi.training.parity.gradient_errors import gradient_errors

    for name, change in (("a", 0.0), ("b", 3.0)):
        gradient = np.zeros(BLOCK + 5, np.float32)
        gradient[0], gradient[-1] = 4.0, change  # in the first block and in the second
        partial = open_partial(tmp_path / name, 1)
        finish(partial, {"w": (gradient.shape, write_gradient(partial, "w", gradient))})
    (error,) = gradient_errors(tmp_path / "b", tmp_path / "a")
    assert (error.norm, error.baseline_norm, error.relative_error) == (5.0, 4.0, 0.75)
    (error,) = gradient_errors(tmp_path / "a", tmp_path / "b")
    assert error.relative_error == pytest.approx(0.6)


def test_a_gradient_of_zeros_has_an_error_of_zero_or_none_at_all(tmp_path: Path) -> None:
    from megatron_magi.training.parity.gradient_errors import gradient_errors

    for name, value in (("zero", 0.0), ("one", 1.0), ("zero_too", 0.0)):
        partial = open_partial(tmp_path / name, 1)
        gradient = np.full(3, value, np.float32)
        finish(partial, {"w": ((3,), write_gradient(partial, "w", gradient))})
    assert gradient_errors(tmp_path / "zero_too", tmp_path / "zero")[0].relative_error == 0.0
    assert gradient_errors(tmp_path / "one", tmp_path / "zero")[0].relative_error == math.inf


# What can be left out, and what cannot


def test_without_gradients_and_recipe_the_gates_say_so(capsys: Capture, write: Write) -> None:
    family = str(write("plain")), str(write("reversed", NOISE, validation=1e-4))
    right = write("magi", ODD)
    for folder in (*map(Path, family), right):
        (folder / "recipe.yaml").unlink()
    code, facts = judge(capsys, family, right)
    skipped = {n: g["text"] for n, g in facts["gates"].items() if g["passed"] is None}
    assert code == 0 and set(skipped) == {"gradients", "loss_start"}
    assert "no recipe.yaml" in skipped["loss_start"] and facts["dtype"] == "fp32"
    assert facts["gates"]["gradients"]["value"] is None


def test_a_noise_run_without_noise_is_refused(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    right = str(write("magi", ODD))
    for noise in (family[0], str(write("again"))):
        code, _, err = run(capsys, "compare", family[0], right, "--noise", noise)
        assert code == 2 and "must differ from the baseline by rounding" in err
        assert "data.step_order=reversed" in err


@pytest.mark.parametrize(
    "options, text",
    [
        (["--any-loss", "1"], "--any-loss has no effect beside --noise"),
        (["--last-steps", "0"], "--last-steps must be at least 1, got 0"),
    ],
)
def test_options_without_effect_are_refused(
    capsys: Capture, family: tuple[str, str], options: list[str], text: str
) -> None:
    code, _, err = run(capsys, "compare", family[0], family[1], "--noise", family[1], *options)
    assert code == 2 and text in err


def test_noise_thresholds_need_a_noise_run(capsys: Capture, family: tuple[str, str]) -> None:
    code, _, err = run(capsys, "compare", *family, "--loss-drop", "1")
    assert code == 2 and "--loss-drop needs --noise" in err


def test_runs_from_a_checkpoint_are_judged_from_there(capsys: Capture, write: Write) -> None:
    folders = [
        write("plain", gradients=0.0),
        write("reversed", NOISE, 0.02),
        write("magi", ODD, 0.05),
    ]
    for folder in folders:
        lines = (folder / "steps.csv").read_text().splitlines()
        (folder / "steps.csv").write_text("\n".join([lines[0], *lines[61:]]) + "\n")
        gradient_path(folder, 1).rename(gradient_path(folder, 61))
        index = gradient_path(folder, 61) / "index.json"
        index.write_text(index.read_text().replace('"iteration": 1', '"iteration": 61'))
    code, facts = judge(capsys, (str(folders[0]), str(folders[1])), folders[2])
    skipped = [n for n, g in facts["gates"].items() if g["passed"] is None]
    assert (code, skipped) == (0, ["loss_start", "loss_drop"])
    assert facts["gates"]["gradients"]["value"] == pytest.approx(2.5, rel=1e-4)
    assert facts["gates"]["validation"]["text"].startswith(
        "nats between validation losses at step 120"
    )
    assert facts["gates"]["step_1_loss"]["text"].endswith("step 61")


def test_the_figure_names_every_run(
    capsys: Capture, family: tuple[str, str], write: Write, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    right = write("magi_cp2", ODD, gradients=0.0)
    control = write("moved", ODD + 0.01, gradients=0.3, steps=60)
    stem = tmp_path / "pictures" / "noise"
    code, out, _ = run(capsys, "compare", family[0], str(right), "--noise", family[1],
                       "--expect-fail", str(control), "--allow-shorter", "--loss-drop", "4.9",
                       "--out", str(stem))  # fmt: skip
    assert code == 0 and f"wrote {stem}.png" in out
    svg = stem.with_suffix(".svg").read_text()
    for text in ("plain (baseline)", "magi_cp2", "moved", "|noise|", "nats per token", "step"):
        assert text in svg, text


def test_without_matplotlib_the_verdict_stands(
    capsys: Capture,
    family: tuple[str, str],
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    right = write("magi", ODD, gradients=0.0)
    code, out, _ = run(capsys, "compare", family[0], str(right), "--noise", family[1],
                       "--loss-drop", "4.9")  # fmt: skip
    assert code == 0 and "no figure: pictures need matplotlib" in out
