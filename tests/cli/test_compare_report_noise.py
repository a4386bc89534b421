"""The report of a comparison with a noise run: every gate, and controls that must be caught."""

from tests.cli.command import Capture, run
from tests.cli.compare_runs import ODD, PARAMETERS, Write, judge


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
    control = write("moved", ODD, gradients=0.0, vocab_size=640)  # fails loss_start alone
    code, facts = judge(capsys, family, right, "--expect-fail", str(control))
    assert code == 1 and facts["runs"][0]["passed"]
    assert facts["controls"][0]["passed"] is False and facts["controls"][0]["caught_by"] == []


def test_a_failing_run_is_not_saved_by_a_caught_control(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    wrong = write("wrong", ODD, gradients=0.5)
    assert judge(capsys, family, wrong, "--expect-fail", str(wrong))[0] == 1


def test_every_gate_has_a_line_with_value_and_limit(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    wrong = write("wrong", ODD, validation=3e-4)
    code, out, _ = run(capsys, "compare", family[0], str(wrong), "--noise", family[1],
                       "--loss-drop", "4.9", "--no-figure")  # fmt: skip
    words = [line.split() for line in out.splitlines()]
    gates = {w[1]: [w[0], *w[2:5]] for w in words if w[:1] in (["pass"], ["FAIL"], ["skip"])}
    assert code == 1 and "wrong: FAIL (skipped: gradients)" in out
    assert gates["validation"] == ["FAIL", "0.0003", "<=", "0.0002"]
    assert gates["loss_drop"][:3:2] == ["pass", ">="] and gates["mean_loss"][0] == "pass"
    assert gates["gradients"][0] == "skip" and "<=" not in gates["gradients"]
    assert "baseline plain: 120 steps, loss 5.9506 -> " in out and "noise     reversed: 120" in out


def test_facts_have_ratios_and_no_infinite_number(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    wrong = write("wrong", ODD, gradients=0.0, validation=float("inf"))
    _, facts = judge(capsys, family, wrong)
    assert [n["name"] for n in facts["noise"]] == ["reversed"] and facts["dtype"] == "bf16"
    gate = facts["gates"]["validation"]
    assert gate["passed"] is False and gate["value"] is gate["ratio"] is None
    other = facts["gates"]["loss_drop"]
    assert other["ratio"] == other["value"] / other["limit"]
    assert "caught_by" not in facts["runs"][0], "that is said of controls"
