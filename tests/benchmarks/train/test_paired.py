"""Mean differences of paired runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.train import distances, flag_cases, paired
from megatron_magi import masks
from megatron_magi.cli.parser import UsageError
from megatron_magi.launcher.documents import MaskRequest
from megatron_magi.launcher.flags import MaskFunction
from megatron_magi.training.parity.positions import Bucket, write_positions

RECORDS = Path(__file__).parents[3] / "benchmarks" / "records"
BUCKETS = [Bucket(300, 0, 512), Bucket(300, 512, 2048), Bucket(300, 2048, 8192)]


def written(folder: Path, kind: str, seed: int, loss: float) -> None:
    """A run whose loss is larger by this at late positions than at early ones: 0, 1 and 2."""
    run = folder / f"paired_{kind}_{seed}"
    run.mkdir()
    write_positions(run, {bucket: loss + i for i, bucket in enumerate(BUCKETS)})


def test_an_error_is_told_from_chance(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for seed in range(1, 10):
        base = 3 + rng.random()
        errors = {"te": 0, "magi": 0, "right_mask": 4e-3, "near_tile": 8e-3}
        for kind, error in errors.items():
            if (kind, seed) != ("magi", 9):
                written(tmp_path, kind, seed, base + error + rng.normal(0, 1e-3))
    lines = paired.report(tmp_path)
    verdicts = {line.split()[0]: line for line in lines if "all positions" in line}
    assert len(lines) == 3 * (1 + len(BUCKETS))
    assert verdicts["magi"].endswith(", 8 pairs: pass"), "seed 9 has no run of magi"
    assert verdicts["right_mask"].endswith(", 8 pairs: FAILED")
    assert verdicts["near_tile"].endswith(", 8 pairs: caught")


@pytest.mark.parametrize(
    "mean, error, kind, verdict",
    [
        (0.004, 0.003, "magi", "pass"),
        (0.004, 0.1, "magi", "tells nothing"),
        (-0.02, 0.003, "right_mask", "FAILED"),
        (0.004, 0.003, "near_tile", "NOT caught"),
    ],
)
def test_verdicts(mean: float, error: float, kind: str, verdict: str) -> None:
    assert paired.Difference(mean, error, 8).verdict(kind) == verdict


def test_the_interval_is_student_s() -> None:
    made = paired.difference({1: 1.0, 2: 3.0, 3: 2.0}, {1: 1.0, 2: 1.0, 3: 1.0})
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
    with pytest.raises(UsageError, match="4 seeds with all kinds are needed, got 1"):
        paired.report(tmp_path)


def test_runs_of_a_seed_differ_in_attention_alone() -> None:
    runs = {run.name: run for run in flag_cases.paired_runs()}
    assert len(runs) == 5 * len(flag_cases.SEEDS)
    attention = {"attention-backend", "cp-comm-type", "magi-mask"}
    for seed in flag_cases.SEEDS:
        kinds = ("te", "magi", "right_mask", "near_tile", "near_block")
        flags = [runs[f"paired_{kind}_{seed}"].flags for kind in kinds]
        shared = [{k: v for k, v in f.items() if k not in attention} for f in flags]
        assert all(others == shared[0] for others in shared) and shared[0]["seed"] == seed


@pytest.mark.parametrize(
    ("made", "size"), [(flag_cases.near_tile, 128), (flag_cases.near_block, 1024)]
)
def test_the_mask_that_is_given_is_the_right_one(made: MaskFunction, size: int) -> None:
    """For every sample of a microbatch, which the flag joins to one stream."""
    request = MaskRequest((0, 2048, 4096), None)
    right = flag_cases.right_mask(request)
    assert right == masks.from_cu_seqlens([0, 2048, 4096])
    missing = np.argwhere(right.to_dense() & ~made(request).to_dense())
    square = [[1024 + q, 1024 - size + k] for q in range(size) for k in range(size)]
    assert missing.tolist() == square + [[2048 + q, 2048 + k] for q, k in square]
    assert not (made(request).to_dense() & ~right.to_dense()).any()


def test_distances_of_every_pair_of_runs() -> None:
    one, two = np.full(60, 4.0), np.full(60, 4.0)
    two[0], two[-1] = 4.4, 3.6
    found = distances.distance(one, two)
    assert found.absolute == pytest.approx(100 * (0.4 / 4.2 + 0.4 / 3.8) / 60)
    assert found.signed == pytest.approx(100 * (0.4 / 4.2 - 0.4 / 3.8) / 60)
    assert found.last == pytest.approx(-0.4 / 50)
    record = RECORDS / "convergence_b_lr_3e-4_h200_2026-11-22"
    lines = distances.report([record / name for name in ("b_flex", "b_noise", "b_magi_cp2")])
    pair, _, other, steps = lines
    assert pair.split()[:2] == ["b_flex", "b_noise"] and steps == "493 steps"
    assert other.split()[2] > pair.split()[2], "ours is farther than the noise run"
