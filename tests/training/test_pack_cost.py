"""What a sample costs in the planner's model, and what an order by cost leaves of a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_magi import masks
from megatron_magi.config import CostTable, MagiConfig
from megatron_magi.training.data.packed_samples import PackedDataset
from megatron_magi.training.estimate.flops import matmul_parameters
from megatron_magi.training.estimate.pack_cost import pack_cost, sample_order
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)

CUT_AT = 3
RELATIVE = 2e-5
FINE = {"costs": {"tile_q": 8, "tile_k": 8}}
"""Tiles in which samples of 96 tokens differ."""


def config_of(**sections: Any) -> RunConfig:
    return RunConfig(**{"data": DataConfig("x"), **sections})


@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
def test_a_cost_is_tiles_and_products_at_one_rate(recompute: Any) -> None:
    """A causal mask of 8 query tiles has 36 tiles; a tile is two products for every query head."""
    model = ModelConfig(num_layers=3, hidden_size=512, num_attention_heads=4)
    magi = MagiConfig(costs=CostTable(kernel_tflops=100.0))
    run = config_of(model=model, magi=magi, train=TrainConfig(recompute=recompute))
    attention = 3 * 36 * (4 * 2 * 128 * 128 * 128 * 2) / 100e12 * 1e9
    products = 2 * 1024 * matmul_parameters(model) / 100e12 * 1e9
    again = {"none": 0.0, "attention": attention, "full": attention + products}[recompute]
    found = pack_cost(masks.causal(1024), run)
    assert found.forward_ns == pytest.approx(attention + products, rel=1e-4)
    assert found.backward_ns == pytest.approx(2.5 * attention + 2 * products + again, rel=1e-4)
    assert found.total_ns == found.forward_ns + found.backward_ns


def test_the_layout_of_processes_changes_no_cost() -> None:
    """Steps would otherwise hold other samples after a resume in another layout."""
    mask = masks.from_cu_seqlens([0, 700, 1000, 4096])
    plain = config_of()
    nodes = MagiConfig(costs=CostTable(ranks_per_node=3), chunk_size=1000, overlap_degree=2)
    spread = config_of(parallel=ParallelConfig(cp=6, tp=2, pp=2), magi=nodes)
    assert pack_cost(mask, spread) == pack_cost(mask, plain)


def dataset_of(prefix: Path, steps: int | None) -> tuple[PackedDataset, RunConfig]:
    data = DataConfig(str(prefix), seq_length=96, balance_steps=steps)
    magi = MagiConfig(costs=CostTable(tile_q=8, tile_k=8))
    run = config_of(data=data, magi=magi, train=TrainConfig(global_batch_size=8))
    return PackedDataset(data, run.train.seed), run


@pytest.mark.parametrize("dp", [2, 8])
def test_replicas_of_an_epoch_wait_less(packed_data: Path, dp: int) -> None:
    """Modelled attention of the slowest replica, summed over steps; every sample comes once."""
    waited = {}
    for steps in (None, 1, 4):
        dataset, run = dataset_of(packed_data, steps)
        sample_at = sample_order(dataset, run, dp)
        places = range(dataset.samples_per_epoch // 32 * 32)
        taken = [sample_at(place) for place in places]
        assert sorted(taken) == list(places)
        areas = [int((np.diff(dataset.boundaries(n)).astype(np.int64) ** 2).sum()) for n in taken]
        per_step = np.array(areas).reshape(-1, 8 // dp, dp).sum(axis=1)
        waited[steps] = float(per_step.max(axis=1).sum() / per_step.mean(axis=1).sum())
    assert waited[4] < 1 + 0.7 * (waited[None] - 1)
    assert waited[1] == waited[None] if dp == 8 else waited[1] < waited[None]


def test_without_the_key_a_place_has_the_sample_of_its_number(packed_data: Path) -> None:
    sample_at = sample_order(*dataset_of(packed_data, None), 2)
    assert [sample_at(place) for place in range(40)] == list(range(40))


def test_groups_of_steps_begin_where_batches_do(packed_data: Path) -> None:
    """A run that changed its batch begins at a sample that is no multiple of it."""
    dataset, run = dataset_of(packed_data, 2)
    sample_at = sample_order(dataset, run, 2, first_sample=19)
    assert sorted(sample_at(place) for place in range(19, 35)) == list(range(19, 35))
    again = sample_order(dataset, run, 2, first_sample=27)
    assert [again(place) for place in range(27, 51)] == [sample_at(p) for p in range(27, 51)]


@pytest.fixture(scope="module")
def results(
    folder: Path,
    tiny_recipe: Callable[..., dict[str, Any]],
    run_training_jobs: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    def job(
        name: str, steps: int | None, function: str = "train", run: str = "", **more: Any
    ) -> dict[str, Any]:
        kwargs = {k: more.pop(k) for k in ("signal_at", "count") if k in more}
        sections = {
            "data": {"balance_steps": steps},
            "train": {"iterations": 6, "global_batch_size": 4},
            "magi": FINE,
            "parallel": {"dp": 2},
            "validation": {"fraction": 0.2, "interval": 3, "batches": 1},
            **more,
        }
        recipe = tiny_recipe(run or name, folder, **sections)
        world = 2 if set(sections["parallel"].values()) == {2} else 1
        return {"name": name, "function": function, "world": world,
                "kwargs": {"recipe": recipe, **kwargs}}  # fmt: skip

    half = {"load": str(folder / "half" / "checkpoints"), "interval": 100}
    return run_training_jobs(
        [
            job("sampler", None),
            job("own_steps", 1),
            job("numbers", None, "sample_numbers", count=12),
            job("own_numbers", 1, "sample_numbers", count=12),
            job("whole", 4),
            job("half", 4, signal_at=CUT_AT),
            *(
                job(f"to_{name}", 4, parallel=parallel, checkpoint=half)
                for name, parallel in (("dp2", {"dp": 2}), ("dp1", {}), ("pp2", {"pp": 2}))
            ),
        ]
    )


def values(results: dict[str, Any], name: str) -> Any:
    assert "error" not in results[name], results[name]["error"]
    return results[name]["values"]


def column(rows: Any, index: int) -> list[float]:
    return [float.fromhex(row[index]) for row in rows]


@pytest.mark.slow
def test_steps_that_keep_their_samples_train_the_same(results: dict[str, Any]) -> None:
    """Tokens and gradients of a step are summed over all replicas, whoever holds which sample."""
    plain, own = (np.array(values(results, n)) for n in ("numbers", "own_numbers"))
    assert not np.array_equal(plain, own)
    steps = [np.sort(n.reshape(2, 6, 2).swapaxes(0, 1).reshape(6, 4)) for n in (plain, own)]
    assert np.array_equal(*steps)
    rows, other = values(results, "sampler")[0], values(results, "own_steps")[0]
    assert column(other, 1) == pytest.approx(column(rows, 1), rel=1e-6)
    assert column(other, 2) == pytest.approx(column(rows, 2), rel=1e-5)
    assert [float(row[3]) for row in (rows[2], rows[5])] == pytest.approx(
        [float(row[3]) for row in (other[2], other[5])], rel=1e-6
    )


@pytest.mark.slow
def test_a_run_goes_on_inside_a_group_of_steps(results: dict[str, Any]) -> None:
    whole = values(results, "whole")[0]
    assert values(results, "half")[0] == whole[:CUT_AT]
    assert values(results, "to_dp2")[0] == whole[CUT_AT:]
    assert column(whole, 1) != column(values(results, "sampler")[0], 1)
    for layout in ("to_dp1", "to_pp2"):
        rows = values(results, layout)[0]
        for index in (1, 2):
            assert column(rows, index) == pytest.approx(column(whole[CUT_AT:], index), rel=RELATIVE)
