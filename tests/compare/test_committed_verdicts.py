"""Verdicts on committed runs are those that were printed when the runs were made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Capture, run

FILE = "convergence_flag_second_h200_2026-11-26.json"
RECORD = Path(__file__).parents[2] / "benchmarks" / "records" / FILE
STOCK = "--mean-of te_p2p --mean-of te_all_gather --mean-of te_a2a"


@pytest.mark.parametrize(
    "printed, arguments",
    [
        ("verdicts", f"magi magi_again {STOCK}"),
        ("verdict_deterministic", "deterministic_te_p2p magi_deterministic --noise te_p2p"),
    ],
)
def test_a_committed_verdict_is_given_again(capsys: Capture, printed: str, arguments: str) -> None:
    words = [w if w.startswith("-") else str(RECORD / w) for w in arguments.split()]
    _, out, err = run(capsys, "compare", *words, "--every-validation", "--no-figure")
    assert (out, err) == (json.loads(RECORD.read_text())["verdicts"][printed], "")
