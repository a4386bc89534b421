"""compare --noise: errors of gradients, measured from saved ones or read from their CSV."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cli.command import Capture, run
from tests.cli.compare_runs import ODD, PARAMETERS, Write, dump, judge, write_run
from tests.compare.saved_gradients import save_gradients, wgrads_path


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
        shutil.rmtree(Path(folder) / "wgrads")
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
    shutil.rmtree(wgrads_path(right, 1))
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
    shutil.rmtree(right / "wgrads")
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
    save_gradients(wrong, 1, {"w": torch.ones(3)})
    code, _, err = run(capsys, "compare", family[0], str(wrong), "--noise", family[1])
    assert code == 2 and "must be of one model, got another decoder.layers.0.weight" in err


def test_without_noise_the_first_saved_gradients_count(capsys: Capture, tmp_path: Path) -> None:
    """Those of later steps differ by what training amplifies."""
    runs = {"dense": (0.0, 0.0), "magi": (1e-6, 0.5), "moved": (1e-2, 1e-2), "no gradients": ()}
    for name, errors in runs.items():
        write_run(tmp_path / name, 0.0)
        for iteration, error in zip((10, 20), errors, strict=False):
            held = {"weight": torch.ones(4) * (1 + error), "bias": torch.ones(2)}
            save_gradients(tmp_path / name / "save", iteration, held)
    dense, magi, moved, nothing = (str(tmp_path / name) for name in runs)
    code, out, _ = run(
        capsys, "compare", dense, magi, nothing, "--expect-fail", moved, "--no-figure"
    )
    verdicts = [line.split()[-3:] for line in out.splitlines() if line.split()[-1:] == ["PASS"]]
    assert code == 0 and "CAUGHT" in out and "NOT CAUGHT" not in out
    (shown, _), (none, _) = ((words[1], words[2]) for words in verdicts)
    assert float(shown) == pytest.approx(1e-6, rel=0.1) and none == "-"
    strict = ("--any-gradient", "1e-7", "--no-figure", "-q")
    assert run(capsys, "compare", dense, magi, *strict)[:2] == (1, "FAIL magi\n")


@pytest.mark.parametrize("broken", ["dense", "magi"])
def test_a_gradient_with_nan_never_passes(capsys: Capture, tmp_path: Path, broken: str) -> None:
    runs = [write_run(tmp_path / name, 0) for name in ("dense", "magi")]
    for folder in map(Path, runs):
        values = {name: torch.ones(4) for name in PARAMETERS}
        if folder.name == broken:
            values[PARAMETERS[1]][0] = torch.nan
        save_gradients(folder, 1, values)
    code, out, _ = run(capsys, "compare", *runs, "--no-figure", "--json")
    assert code == 1 and json.loads(out)["passed"] is False
