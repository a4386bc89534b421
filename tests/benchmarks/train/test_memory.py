"""The memory benchmark's rows and verdicts; what it measures needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.train import memory as bench
from megatron_magi.training.estimate.dry_run import dry_run
from megatron_magi.training.estimate.memory import RankMemory

pytestmark = pytest.mark.slow  # the own trainer, which is changed no more

ROOT = Path(__file__).parents[3]
GIB = 2**30


def measured(rank: int, peak: int) -> dict[str, Any]:
    return {
        "rank": rank, "weights_and_gradients": 6 * GIB, "optimizer": 12 * GIB, "peak_build": GIB,
        "peak_step": peak, "peak_update": 18 * GIB, "peak": peak, "reserved": peak, "loss": 11.5,
        "grad_norm": 1.0, "tokens_per_second": 12345,
    }  # fmt: skip


def rows(*peaks: float) -> list[dict[str, Any]]:
    case = bench.Case("two", 2, 8192)
    estimate = RankMemory(2 * GIB, 4 * GIB, 12 * GIB, 1 * GIB, GIB // 2, GIB // 4, GIB // 4)
    return [bench.row(case, estimate, measured(r, int(p * GIB))) for r, p in enumerate(peaks)]


def test_a_row_holds_parts_peak_and_their_ratio() -> None:
    (row,) = rows(25)
    assert row["estimate"]["total"] == 20 * GIB and row["ratio"] == 0.8
    assert row["estimate"]["activations"] == GIB
    assert row["rank"] == 0 and "rank" not in row["measured"]
    shown = bench.lines(row)
    assert shown[1].split() == ["estimated", "6.000", "12.000", "2.000", "20.000"]
    assert shown[2].split() == ["measured", "6.000", "12.000", "7.000", "25.000"]


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ((20, 20), []),
        ((17.5, 23), []),
        ((20, 25), ["two rank 1: the estimate is 0.800 of the measured peak"]),
        ((16, 20), ["two rank 0: the estimate is 1.250 of the measured peak"]),
        ((20,), ["two: 1 of 2 ranks finished"]),
        ((), ["two: 0 of 2 ranks finished"]),
    ],
)
def test_what_is_wrong(peaks: tuple[float, ...], expected: list[str]) -> None:
    assert bench.misses(rows(*peaks), [bench.Case("two", 2, 8192)]) == expected


def test_cases_are_chosen_by_name_and_gpus() -> None:
    def names(num_gpus: int, *argv: str) -> list[str]:
        return [c.name for c in bench.chosen_cases(bench.options(list(argv)), num_gpus)]

    assert {c.ranks for c in bench.CASES} == {1, 2}
    assert names(2) == [c.name for c in bench.CASES]
    assert names(2, "--ranks", "2") == [c.name for c in bench.CASES if c.ranks == 2]
    assert names(1, "--cases", "1b_8k,1b_8k_tp2") == ["1b_8k"]
    with pytest.raises(ValueError, match="got \\['nope'\\]"):
        names(2, "--cases", "nope")
    with pytest.raises(ValueError, match="no case fits 1 GPUs"):
        names(1, "--ranks", "2")


def test_every_case_fits_an_h200() -> None:
    for case in bench.CASES:
        config = case.config(Path("nowhere"))
        estimate = dry_run(config, case.ranks).memory[0].total
        assert 10 * GIB < estimate < 110 * GIB, (case.name, estimate / GIB)
        assert config.model.kv_channels in (64, 128)  # what the CUDA kernel takes
        assert config.data.seq_length * config.train.global_batch_size * 4 < 1 << 20


def test_without_a_gpu_it_says_so() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.train.memory"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: a CUDA GPU is needed to measure its memory, got none")
