"""Mean differences of paired runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.train import distances, flag_cases, flag_masks, paired
from megatron_magi import masks
from megatron_magi.cli.parser import UsageError
from megatron_magi.compare.positions import Bucket, write_positions
from megatron_magi.launcher.documents import MaskRequest
from megatron_magi.launcher.flags import MaskFunction

RECORDS = Path(__file__).parents[3] / "benchmarks" / "records"
BUCKETS = [Bucket(300, 0, 512), Bucket(300, 512, 2048), Bucket(300, 2048, 8192)]


def written(folder: Path, kind: str, seed: int, loss: float) -> None:
    """A run whose loss is larger by this at late positions than at early ones: 0, 1 and 2."""
    run = folder / f"paired_{kind}_{seed}"
    run.mkdir()
    write_positions(run, {bucket: loss + i for i, bucket in enumerate(BUCKETS)})


def test_an_error_is_told_from_chance(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    errors = {"te": 0, "te_a2a": 0, "magi": 4e-3, "right_mask": 0, "near_block": 1e-2}
    for seed in range(1, 10):
        base = 3 + rng.random()
        for kind, error in errors.items():
            if (kind, seed) != ("magi", 9):
                written(tmp_path, kind, seed, base + error + rng.normal(0, 1e-3))
    first, *judged = [line for line in paired.report(tmp_path) if "all positions" in line]
    assert first.startswith("near_block   - right_mask") and first.endswith("8 pairs: caught")
    verdicts = {line.split()[0]: line.rsplit(": ", 1)[1] for line in judged}
    assert verdicts == {"te_a2a": "pass", "magi": "pass", "right_mask": "pass"}
    assert len(paired.report(tmp_path)) == 4 * (1 + len(BUCKETS))
    for seed in range(1, 9):
        (tmp_path / f"paired_magi_{seed}" / "positions.csv").unlink()
    with pytest.raises(UsageError, match=r"4 seeds with runs of te, te_a2a, magi, .* got 0"):
        paired.report(tmp_path)


@pytest.mark.parametrize(
    ("mean", "error", "margin", "verdict"),
    [
        (0.002, 0.001, 0.006, "pass"),
        (0.004, 0.001, 0.006, "FAILED"),  # 0.0064 at most
        (0.001, 0.01, 0.006, "tells nothing"),
        (0.003, 0.001, 0.006, "pass"),  # other than 0, but by less than the error
        (-0.02, 0.003, 0.006, "FAILED"),
        (0.02, 0.001, -0.001, "tells nothing"),  # the error was not caught
    ],
)
def test_verdicts(mean: float, error: float, margin: float, verdict: str) -> None:
    assert paired.Difference(mean, error, 8).verdict(margin) == verdict


def test_the_interval_is_student_s() -> None:
    made = paired.difference({1: 1.0, 2: 3.0, 3: 2.0}, {1: 1.0, 2: 1.0, 3: 1.0})
    assert made.num_pairs == 3 and made.mean == 1
    assert made.error == pytest.approx(1 / math.sqrt(3))
    assert made.interval == pytest.approx(4.303 / math.sqrt(3))


def test_positions_count_by_their_tokens() -> None:
    losses = {bucket: float(i) for i, bucket in enumerate(BUCKETS)}
    assert paired.weighted_mean(losses) == pytest.approx((1536 + 2 * 6144) / 8192)


def test_runs_of_a_seed_differ_in_attention_alone() -> None:
    runs = {run.name: run for run in flag_cases.paired_runs()}
    assert len(runs) == 5 * len(flag_cases.SEEDS)
    attention = {"attention-backend", "cp-comm-type", "magi-mask"}
    for seed in flag_cases.SEEDS:
        flags = [runs[f"paired_{kind}_{seed}"].flags for kind in paired.KINDS]
        shared = [{k: v for k, v in f.items() if k not in attention} for f in flags]
        assert all(others == shared[0] for others in shared) and shared[0]["seed"] == seed


@pytest.mark.parametrize(
    ("made", "size"), [(flag_masks.near_tile, 128), (flag_masks.near_block, 4096)]
)
def test_the_mask_that_is_given_is_the_right_one(made: MaskFunction, size: int) -> None:
    """For every sample of a microbatch, which the flag joins to one stream."""
    length = 2 * size
    request = MaskRequest((0, length, 2 * length), None)
    right = flag_masks.right_mask(request)
    assert right == masks.from_cu_seqlens([0, length, 2 * length])
    dense = right.to_dense()
    for start in (0, length):
        dense[start + size : start + length, start : start + size] = False
    assert np.array_equal(made(request).to_dense(), dense)


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
