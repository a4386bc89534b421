"""Steps of replicas that are made of single samples' times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner.layouts import HEADS, MODEL
from benchmarks.train import replicas

ROOT = Path(__file__).parents[3]


def test_the_page_has_the_table_of_the_record() -> None:
    record = json.loads((ROOT / "benchmarks/records/replicas_cpu_2026-11-29.json").read_text())
    page = (ROOT / "docs/guides/layouts.md").read_text()
    assert "\n".join(replicas.table(record["rows"])) in page


def test_the_first_sample_is_that_of_the_recorded_run() -> None:
    """Whose start-up line counts its documents."""
    record = json.loads((ROOT / "benchmarks/records/samples_h200_2026-11-29.json").read_text())
    runs = [row for row in record["rows"] if row["lines"]]
    assert len(runs) == 2
    for run in runs:
        documents, length = run["case"].split()[-2:]
        (first,) = replicas.sample_lengths(documents.removesuffix("-docs"), int(length), 1)
        assert f"documents by cu_seqlens ({len(first)} in the first microbatch)" in str(
            run["lines"]
        )


def test_a_step_waits_for_the_fullest_replica() -> None:
    times = np.array([4.0, 1, 3, 2, 1, 1, 2, 2, 9])
    assert replicas.over_mean(times, times, 2, 2, dealt=False) == (7 + 3) / (5 + 3)
    assert replicas.over_mean(times, times, 2, 2, dealt=True) == 1
    assert replicas.over_mean(times, times[::-1], 2, 1, dealt=False) == (
        (4 + 3 + 1 + 2) / (2.5 + 2.5 + 1 + 2)
    )


def test_samples_are_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times that follow the predicted ones of the loader's samples leave the fit no error."""
    lengths = replicas.sample_lengths("wlb", 32768, 20)
    assert {int(x.sum()) for x in lengths} == {32768} and len({len(x) for x in lengths}) > 4
    ms = [1e3 * (2 * MODEL.sample_seconds(x, HEADS) + 0.1) for x in lengths]
    rows = [{"case": "magi wlb-docs 32768", "ms": ms}, {"case": "late", "ms": [], "error": "x"}]
    (tmp_path / "samples.json").write_text(json.dumps({"meta": {}, "rows": rows}))
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["replicas", f"{tmp_path}/samples.json", "--out", str(out)])
    assert replicas.main() == 0
    assert "| `magi wlb-docs 32768` | 16 | " in capsys.readouterr().out
    (row,) = json.loads(out.read_text())["rows"]
    assert row["fit"] == pytest.approx([2, 0.1]) and row["fit_error"] < 1e-9
    assert all(1 <= got < wanted for got, wanted in row["waiting"][:2])
