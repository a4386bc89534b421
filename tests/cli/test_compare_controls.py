"""compare --expect-fail: a control must be caught, and saves no run."""

from pathlib import Path

from tests.cli.command import Capture, run
from tests.cli.compare_runs import ODD, PARAMETERS, Write, judge, write_run


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
