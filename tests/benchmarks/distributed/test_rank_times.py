"""The benchmark of ranks' kernel times, as far as it goes without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.distributed import rank_times as bench
from megatron_magi.cli.parser import UsageError


def test_plans_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "times.json"
    given = ["--dry", "--masks", "swa1024,d1:0-1", "--tokens", "4096", "--record", str(record)]
    assert bench.main(given) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [text.split()[0] for text in shown] == ["swa1024", "d1:0", "d1:1"]
    rows = json.loads(record.read_text())["rows"]
    for row, text in zip(rows, shown, strict=True):
        loads = row["loads"]
        assert row["imbalance"] == pytest.approx(2 * max(loads) / sum(loads), abs=1e-4)
        assert float(text.split()[-1]) == pytest.approx(row["imbalance"], abs=1e-3)


def test_both_plans_share_a_layout() -> None:
    args = bench.parser().parse_args([])
    args.ranks = 2
    plan, one = bench.plans_of(bench.pack("d1:0", 8192), args)
    assert one.layout is plan.layout and len(one.rank_plan(0).stages) == 1
    assert {stage.num_keys for stage in one.rank_plan(0).stages} == {
        sum(stage.num_keys for stage in plan.rank_plan(0).stages)
    }


def test_a_line_names_the_slowest_rank() -> None:
    ms = {f"{rank} {what}": 1.0 + rank for rank in (0, 1)
          for what in ("forward", "backward", "stages", "beside")}  # fmt: skip
    row = {"mask": "full", "tokens": 8, "imbalance": 1.0, "ranks": 2,
           "ms": ms | {"one forward": 1.5, "one backward": 1.0}}  # fmt: skip
    assert "forward 2.000 ms (1.333, 0.750 of one GPU)" in bench.line(row)


def test_unknown_masks_are_refused() -> None:
    with pytest.raises(SystemExit, match="--masks takes"):
        bench.main(["--dry", "--masks", "d3:0"])


@pytest.mark.parametrize(
    "given, text",
    [
        (("--tokens", "4096,"), "argument --tokens: must be a whole number of 1 or more"),
        (("--tokens", "0"), "argument --tokens: must be a whole number of 1 or more, got 0"),
        (("--ranks", "0"), "argument --ranks: must be"),
        (("--turns", "0"), "argument --turns: must be"),
        (("--record", "/nonexistent/x.json"), "--record: must be a file in a folder that exists"),
    ],
)
def test_wrong_options_end_before_the_first_measurement(given: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        bench.main(["--dry", "--masks", "causal", *given])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_times_need_a_gpu() -> None:
    with pytest.raises(UsageError, match="kernel times need a GPU, got none; pass --dry"):
        bench.main(["--masks", "causal"])
