"""compare: what is compared, and the verdict on curves without a noise run."""

import json
from pathlib import Path

import pytest

from tests.cli.command import Capture, run
from tests.cli.compare_runs import write_run, write_steps


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


def test_equal_runs_pass_also_where_their_norm_is_zero(capsys: Capture, tmp_path: Path) -> None:
    for name, norm in (("a", 0), ("b", 0), ("c", 1e-9)):
        rows = [{"iteration": i, "lm_loss": 2, "grad_norm": norm} for i in (1, 2)]
        write_steps(tmp_path / name, rows)
    a, b, c = (str(tmp_path / name) for name in "abc")
    code, out, _ = run(capsys, "compare", a, b, c, "--no-figure", "-q")
    assert (code, out) == (1, "PASS b\nFAIL c\n")


@pytest.mark.parametrize("text", ["nan", "-1"])
def test_a_threshold_that_nothing_could_pass_is_refused(capsys: Capture, text: str) -> None:
    code, _, err = run(capsys, "compare", "a", "b", "--any-loss", text)
    assert code == 2 and f"--any-loss: must be at least 0, got {text}" in err


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
        (",1000.0,0,0,\r\n4,", "\r\n4,", "NoneType"),
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


@pytest.mark.parametrize(
    "options, text",
    [
        (["--any-loss", "1"], "--any-loss has no effect with --noise"),
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
