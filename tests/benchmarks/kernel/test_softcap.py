"""The benchmark of softcap, with stand-ins on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernel import softcap
from benchmarks.kernel.softcap import main, row_of
from benchmarks.lib.cell import Case, Inputs
from megatron_magi.core.kernel.widths import Widths


class Timed:
    """In place of the kernels: notes what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[Case, str, float]] = []

    def call(self, case: Case, direction: str, x: Inputs) -> Any:
        self.asked.append((case, direction, x.q.flatten()[0].item()))
        return lambda: (torch.zeros(1),)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    stand_in, ones = Timed(), torch.ones(2, 1, 4)
    monkeypatch.setattr(softcap, "Ours", lambda: stand_in)
    monkeypatch.setattr("benchmarks.lib.timing._timed", lambda call: (call(), 1.0))
    monkeypatch.setattr(Inputs, "random", lambda *_: Inputs(ones, ones, ones, ones))
    times = {"without": [2.0, 2.0, 9.0], "softcap": [3.0, 1.0, 3.0]}
    monkeypatch.setattr(softcap, "time_calls", lambda able, _: {n: times[n] for n in able})
    return stand_in


def test_calls_differ_in_the_softcap_alone(timed: Timed, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    argv = ["--record", str(path), "--commit", "abc", "--softcap", "50", "--sizes", "1", "20"]
    assert main([*argv, "--head-dims", "64", "--masks", "causal", "--seqlens", "128"]) == 0
    record = json.loads(path.read_text())
    assert record["meta"]["softcap"] == 50 and record["meta"]["commit"] == "abc"
    rows = record["rows"]
    assert [(row["size"], row["direction"]) for row in rows] == [
        (size, direction) for size in (1.0, 20.0) for direction in ("fwd", "bwd", "deterministic")
    ]
    assert all(row["ratio"] == 1.5 and row["n"] == 3 for row in rows)
    for (without, *given), (capped, *same) in zip(timed.asked[::2], timed.asked[1::2], strict=True):
        assert (without.softcap, capped.softcap) == (0.0, 50.0) and given == same
        assert without.deterministic == capped.deterministic and capped.level == "op"
    sizes = [x for _, _, x in timed.asked]
    assert sizes == [1.0] * 6 + [20.0] * 6
    assert [case.deterministic for case, *_ in timed.asked[:6]] == [False] * 4 + [True] * 2


def test_a_row_has_medians_spread_and_their_ratio() -> None:
    times = {"without": [1.0, 2.0, 4.0], "softcap": [3.0, 3.0, 5.0]}
    flops = Case("full", 1000).flops(4, Widths(64, 64), "fwd")
    row = row_of(times, flops)
    assert row["ratio"] == 1.5 and row["without"]["min_ms"] == 1.0
    assert row["softcap"]["max_ms"] == 5.0
    assert row["without"]["tflops"] == round(flops / 2.0 / 1e9, 1)
