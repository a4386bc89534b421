"""Verdicts on committed runs are those that were printed when the runs were made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Capture, run

RUNS = Path("benchmarks/records/convergence_flag_second_h200_2026-11-26")


STOCK = "--mean-of te_p2p --mean-of te_all_gather --mean-of te_a2a"


@pytest.mark.parametrize(
    "printed, arguments",
    [
        ("verdicts.txt", f"magi magi_again {STOCK}"),
        ("verdict_deterministic.txt", "deterministic_te_p2p magi_deterministic --noise te_p2p"),
    ],
)
def test_a_committed_verdict_is_given_again(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, printed: str, arguments: str
) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent.parent / RUNS)
    options = ("--every-validation", "--no-figure")
    _, out, err = run(capsys, "compare", *arguments.split(), *options)
    assert (out, err) == (Path(printed).read_text(), "")
