"""The benchmark of new masks, on gloo: which passes count, and what their ratio is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.distributed import new_masks as bench
from megatron_magi import AttnMask
from megatron_magi.cli.parser import UsageError

SMALL = ["--device", "cpu", "--heads", "4,2", "--head-dim", "8", "--layers", "2", "--packs", "2"]


def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    record = tmp_path / "new.json"
    given = ["--ranks", "2", "--tokens", "32,48", "--rounds", "2", "--record", str(record)]
    assert bench.main([*SMALL, *given]) == 0
    rows = json.loads(record.read_text())["rows"]
    assert [(row["tokens"], row["ranks"], row["rounds"]) for row in rows] == [
        (32, 2, 2),
        (48, 2, 2),
    ]
    for row in rows:
        assert 0 < row["least"] <= row["new_over_repeated"] <= row["most"]
        assert min(row["new_ms"], row["repeated_ms"]) > 0


def test_every_counted_pack_runs_once_new_and_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[bytes, ...]] = []

    def passed(masks: list[AttnMask], *_: Any) -> float:
        order.append(tuple(mask.slices.tobytes() for mask in masks))
        return float(len(order))

    monkeypatch.setattr(bench, "passed", passed)
    args = bench.options([*SMALL, "--ranks", "1", "--rounds", "5"])
    times = bench.rounds(4096, args, torch.device("cpu"))
    assert {name: len(ms) for name, ms in times.items()} == {"new": 5, "repeated": 5}
    for new, again in zip(times["new"], times["repeated"], strict=True):
        assert new < again and order[int(new) - 1] == order[int(again) - 1]
    assert len({order[int(new) - 1] for new in times["new"]}) == 5


def test_the_ratio_is_that_of_the_same_packs() -> None:
    args = bench.options([*SMALL, "--ranks", "1"])
    row = bench.row(64, args, {"new": [2.0, 6.0, 22.0], "repeated": [2.0, 5.0, 20.0]})
    assert (row["new_over_repeated"], row["least"], row["most"]) == (1.1, 1.0, 1.2)
    assert (row["new_ms"], row["repeated_ms"]) == (3.0, 2.5)
    assert "new over repeated 1.100 (1.000 to 1.200)" in bench.line(row)


def test_one_microbatch_has_no_next_one() -> None:
    with pytest.raises((SystemExit, UsageError), match="packs"):
        bench.options(["--packs", "1"])
