"""The plain baselines train like the others, see another mask, and say what they cannot do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.training.data.packed_samples import microbatch_indices

ROOT = Path(__file__).parents[2]
RELATIVE = 2e-5
WIDE_WEIGHTS = {"init_std": 0.2}
"""With the usual 0.02 a new model attends to all keys alike and its losses hardly see the mask."""
MASKS = ("document", "causal")
RUNS: dict[str, dict[str, Any]] = {
    **{
        f"{attention}_{mask}": {"attention": attention, "data": {"mask": mask}}
        for attention in ("sdpa", "dense", "magi")
        for mask in MASKS
    },
    "sdpa_moved": {"attention": "sdpa", "data": {"moved_boundary": 3}},
    "dense_moved": {"attention": "dense", "data": {"moved_boundary": 3}},
    "flex_plain": {"attention": "flex_plain"},
    "magi_reversed": {"data": {"step_order": "reversed"}},
    "magi_dp2_reversed": {"data": {"step_order": "reversed"}, "parallel": {"dp": 2}},
}


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_recipe: Callable[..., dict[str, Any]],
    run_training_jobs: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    train = {"global_batch_size": 4, "iterations": 4}

    def job(name: str, sections: dict[str, Any], function: str = "train", **more: Any) -> Any:
        recipe = tiny_recipe(name, folder, **{"model": WIDE_WEIGHTS, "train": train, **sections})
        world = recipe.get("parallel", {}).get("dp", 1)
        kwargs = {"recipe": recipe, **more}
        return {"name": name, "function": function, "kwargs": kwargs, "world": world}

    order = RUNS["magi_dp2_reversed"]
    return run_training_jobs(
        [
            *(job(name, sections) for name, sections in RUNS.items()),
            job("numbers", order, "sample_numbers", count=4),
        ]
    )


def steps(results: dict[str, Any], name: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms."""
    assert "error" not in results[name], results[name]["error"]
    rows = results[name]["values"][0]
    assert isinstance(rows, list) and len(rows) == 4, rows
    return [float.fromhex(r[1]) for r in rows], [float.fromhex(r[2]) for r in rows]


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_sdpa_trains_like_the_others(results: dict[str, Any], mask: str) -> None:
    losses, norms = steps(results, f"sdpa_{mask}")
    for other in (f"dense_{mask}", f"magi_{mask}"):
        assert (losses, norms) == tuple(
            pytest.approx(numbers, rel=RELATIVE) for numbers in steps(results, other)
        )


@pytest.mark.slow
def test_sdpa_sees_its_mask(results: dict[str, Any]) -> None:
    """Causal, documents and documents with a moved boundary are three different trainings."""
    names = ("sdpa_document", "sdpa_causal", "sdpa_moved")
    norms = [steps(results, name)[1][0] for name in names]
    for a, b in zip(norms, [*norms[1:], norms[0]], strict=True):
        assert abs(a - b) / b > 3 * RELATIVE
    moved, dense = steps(results, "sdpa_moved"), steps(results, "dense_moved")
    assert moved[0] == pytest.approx(dense[0], rel=RELATIVE)
    assert moved[1] == pytest.approx(dense[1], rel=RELATIVE)


@pytest.mark.slow
def test_flex_plain_without_a_gpu_is_refused_before_it_trains(results: dict[str, Any]) -> None:
    (answer,) = results["flex_plain"]["values"]
    assert answer.startswith("RecipeError: attention: flex_plain needs a GPU"), answer
    assert "set attention=sdpa or attention=dense" in answer


@pytest.mark.slow
def test_the_command_line_says_so_in_one_line(packed_data: Path, tmp_path: Path) -> None:
    overrides = (
        *("parallel.cp=1", f"data.path={packed_data}", "data.seq_length=96"),
        *("attention=flex_plain", "validation.interval=null", f"log.dir={tmp_path}"),
    )
    ran = subprocess.run(
        [sys.executable, "-m", "megatron_magi", "train", "tiny_llama_cpu", *overrides],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ran.returncode in (1, 2), ran.stderr
    assert "attention: flex_plain needs a GPU" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not list(tmp_path.rglob("steps.csv"))


@given(dp=st.integers(1, 5), per_rank=st.integers(1, 5), first=st.integers(0, 99), steps=st.just(3))
def test_a_reversed_step_has_the_same_samples_the_other_way_round(
    dp: int, per_rank: int, first: int, steps: int
) -> None:
    batch = dp * per_rank

    def taken(is_reversed: bool) -> list[list[int]]:
        """Per rank, in its order."""
        made = (microbatch_indices(batch, r, dp, first, is_reversed) for r in range(dp))
        return [list(islice(numbers, steps * per_rank)) for numbers in made]

    straight, turned = taken(False), taken(True)
    for step in range(steps):
        mine = slice(step * per_rank, (step + 1) * per_rank)
        begin = first + step * batch
        whole = set(range(begin, begin + batch))
        assert {n for rank in straight for n in rank[mine]} == whole
        assert {n for rank in turned for n in rank[mine]} == whole
        mirrored = [[2 * begin + batch - 1 - n for n in rank[mine]] for rank in straight]
        assert [rank[mine] for rank in turned] == mirrored


@pytest.mark.slow
def test_a_reversed_run_takes_other_microbatches_and_trains_the_same(
    results: dict[str, Any],
) -> None:
    assert results["numbers"]["values"] == [[3, 1, 7, 5], [2, 0, 6, 4]]
    losses, norms = steps(results, "magi_document")
    for name in ("magi_reversed", "magi_dp2_reversed"):
        turned, turned_norms = steps(results, name)
        assert turned == pytest.approx(losses, rel=1e-6)
        assert turned_norms == pytest.approx(norms, rel=1e-5)
