"""The report of a comparison without a noise run: verdicts, facts for programs, speed."""

import json
from pathlib import Path

import pytest

from megatron_magi.cli.compare_report import number
from tests.cli.command import Capture, run
from tests.cli.compare_runs import write_run


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


def test_the_table_has_a_line_for_each_run(capsys: Capture, tmp_path: Path) -> None:
    """The baseline has no differences, and a long name moves no column."""
    baseline, wrong = (write_run(tmp_path / n, noise) for n, noise in (
        ("dense", 0.0), ("a_name_longer_than_the_others", 1e-3)))  # fmt: skip
    code, out, _ = run(capsys, "compare", baseline, wrong, "--no-figure")
    head, rule, first, second, limits, *_ = out.splitlines()
    assert code == 1 and set(rule) == {"-"} and len(rule) == len(head)
    assert first.split() == ["dense", "12", "2.367879", "2.000006", "2.000000", "1,000",
                             "-", "-", "-", "-", "baseline"]  # fmt: skip
    assert second.split()[-4:] == ["1.2e-02", "1.0e-03", "-", "FAIL"]
    assert len(first) - len("baseline") == len(second) - len("FAIL") == head.index("verdict")
    assert limits.split()[0] == "thresholds" and len(limits.split()) == 5


def test_json_has_null_for_what_is_not_finite(capsys: Capture, tmp_path: Path) -> None:
    assert [number(x) for x in (1.5, float("nan"), -float("inf"))] == [1.5, None, None]
    baseline = write_run(tmp_path / "dense", 0.0, num_processes=2)
    broken = write_run(tmp_path / "broken", float("nan"))
    code, out, _ = run(capsys, "compare", baseline, broken, "--json", "--no-figure")
    facts = json.loads(out, parse_constant=pytest.fail)
    (_, run_facts) = facts["runs"]
    assert code == 1 and facts["passed"] is run_facts["passed"] is False
    assert run_facts["last_loss"] is run_facts["worst_loss_difference"] is None
    assert run_facts["speed_ratio"] == 1 and run_facts["tokens_per_second_per_process"] is None
    assert facts["runs"][0]["tokens_per_second_per_process"] == 500


def test_speeds_of_unknown_worlds_are_said_to_be_so(capsys: Capture, tmp_path: Path) -> None:
    baseline = write_run(tmp_path / "dense", 0.0, num_processes=2)
    other = write_run(tmp_path / "magi", 0.0, speed=2500)
    _, out, _ = run(capsys, "compare", baseline, other, "--no-figure")
    (line,) = [line for line in out.split("speed:")[1].splitlines() if "magi" in line]
    assert "2,500 tokens/s; 2.50 times" in line and "per process" not in line
    assert line.endswith("; on how many processes is not recorded")
