"""Mean differences of paired runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.train import flag_cases, paired
from megatron_magi.cli.parser import UsageError
from megatron_magi.training.parity.positions import Bucket, write_positions

BUCKETS = [Bucket(300, 0, 512), Bucket(300, 512, 2048), Bucket(300, 2048, 8192)]


def written(folder: Path, kind: str, seed: int, loss: float) -> None:
    """A run whose loss is larger by this at late positions than at early ones: 0, 1 and 2."""
    run = folder / f"paired_{kind}_{seed}"
    run.mkdir()
    write_positions(run, {bucket: loss + i for i, bucket in enumerate(BUCKETS)})


def test_an_error_is_told_from_chance(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for seed in range(1, 9):
        base, chance = 3 + rng.random(), rng.normal(0, 1e-3, 3)
        for kind, by in {"te": 0, "magi": 0, "near_tile": 8e-3}.items():
            written(tmp_path, kind, seed, base + by + chance[len(kind) % 3])
    lines = {line[:28].strip(): line for line in paired.report(tmp_path)}
    assert len(lines) == 2 * (1 + len(BUCKETS))
    for name, line in lines.items():
        told = "does not differ" if name.startswith("magi") else "differs"
        assert line.endswith(f"8 pairs: {told}"), line


def test_the_interval_is_student_s() -> None:
    made = paired.difference({1: 1.0, 2: 3.0, 3: 2.0}, {1: 1.0, 2: 1.0, 3: 1.0, 4: 9.0})
    assert made.num_pairs == 3 and made.mean == 1
    assert made.error == pytest.approx(1 / math.sqrt(3))
    assert made.interval == pytest.approx(4.303 / math.sqrt(3))


def test_positions_count_by_their_tokens() -> None:
    losses = {bucket: float(i) for i, bucket in enumerate(BUCKETS)}
    assert paired.weighted_mean(losses) == pytest.approx((1536 + 2 * 6144) / 8192)


def test_runs_that_are_missing_are_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="paired_te_SEED are needed, got none"):
        paired.report(tmp_path)
    written(tmp_path, "te", 1, 3.0)
    written(tmp_path, "magi", 1, 3.0)
    with pytest.raises(UsageError, match="needs two pairs of runs, got 1"):
        paired.report(tmp_path)


def test_runs_of_a_seed_differ_in_attention_alone() -> None:
    runs = {run.name: run for run in flag_cases.paired_runs()}
    assert len(runs) == 4 * len(flag_cases.SEEDS)
    attention = {"attention-backend", "cp-comm-type", "magi-mask"}
    for seed in flag_cases.SEEDS:
        flags = [runs[f"paired_{kind}_{seed}"].flags for kind in ("te", "magi", "near_tile")]
        shared = [{k: v for k, v in f.items() if k not in attention} for f in flags]
        assert shared[0] == shared[1] == shared[2] and shared[0]["seed"] == seed
