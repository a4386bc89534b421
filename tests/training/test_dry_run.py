"""What a dry run says, against the model, optimizer and autograd graph of a real run."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_magi.core.mask.builders import from_cu_seqlens
from megatron_magi.training.data.packed_samples import PackedDataset
from megatron_magi.training.estimate.dry_run import assumed_sample, dry_run, report
from megatron_magi.training.estimate.flops import model_parameters, rank_parameters
from megatron_magi.training.estimate.memory import (
    MASKS_KEPT,
    Fused,
    activation_bytes,
    layer_bytes,
    rank_memory,
    receive_bytes,
)
from megatron_magi.training.estimate.pack_cost import sample_order
from megatron_magi.training.recipe.recipe import build_config, load_recipe
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ON_CPU = Fused(norms=False, parts=False)
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide": {"model": {"ffn_hidden_size": 256, "num_query_groups": 4, "tie_embeddings": False}},
    "bf16": {"train": {"dtype": "bf16"}},
    "full": {"train": {"recompute": "full"}},
    "attention": {"train": {"recompute": "attention"}},
    "dense": {"attention": "dense"},
    "sdpa": {"attention": "sdpa"},
    "sdpa_causal": {"attention": "sdpa", "data": {"mask": "causal"}},
    "tp2": {"parallel": {"tp": 2}},
    "tp2_sp": {"parallel": {"tp": 2, "sequence_parallel": True}},
    "cp2_sharded": {"parallel": {"cp": 2, "distributed_optimizer": True}},
    "bf16_sharded": {
        "parallel": {"dp": 2, "distributed_optimizer": True},
        "train": {"dtype": "bf16"},
    },
    "pp2": {"parallel": {"pp": 2}},
    "pp2_untied": {"parallel": {"pp": 2}, "model": {"tie_embeddings": False}},
}


BIG_OUTPUT = {"vocab_size": 8192}
PEAKS: dict[str, dict[str, Any]] = {
    "deep": {"model": {"num_layers": 12}},
    "long": {"model": {"num_layers": 8}, "data": {"seq_length": 256}},
    "deep_full": {"model": {"num_layers": 12}, "train": {"recompute": "full"}},
    "vocabulary": {"model": BIG_OUTPUT},
    "cp2": {"model": {"num_layers": 8}, "parallel": {"cp": 2}},
    # One microbatch: gloo lets go of the tensors of finished collectives only later.
    "tp2_sp": {
        "model": {"num_layers": 8},
        "parallel": {"tp": 2, "sequence_parallel": True},
        "train": {"global_batch_size": 1},
    },
    "cp2_sharded_bf16": {
        "model": {"num_layers": 8, **BIG_OUTPUT},
        "parallel": {"cp": 2, "distributed_optimizer": True},
        "train": {"dtype": "bf16"},
    },
}
"""Few heads, short samples: the reference kernel holds all scores of a document, ours does not."""


@pytest.fixture(scope="module")
def recipes(
    tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Callable[..., dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    model = {"hidden_size": 64, "ffn_hidden_size": 192}
    few = {"num_attention_heads": 2, "num_layers": 4}
    data = {"seq_length": 128}

    def make(name: str, base: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
        merged = {
            "model": {**base, **sections.get("model", {})},
            "data": data | sections.get("data", {}),
        }
        return tiny_recipe(name, folder, **{**sections, **merged})

    runs = {name: make(name, model, sections) for name, sections in RUNS.items()}
    peaks = {f"peak_{n}": make(n, {**model, **few}, sections) for n, sections in PEAKS.items()}
    return runs | peaks


@pytest.fixture(scope="module")
def results(
    recipes: dict[str, dict[str, Any]], run_training_jobs: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    return run_training_jobs(
        [
            {
                "name": name,
                "function": "peak" if name.startswith("peak") else "measure",
                "kwargs": {"recipe": recipe},
                "world": math.prod(
                    v
                    for k, v in recipe.get("parallel", {}).items()
                    if k in ("tp", "pp", "cp", "dp")
                ),
            }
            for name, recipe in recipes.items()
        ]
    )


def config_of(recipe: dict[str, Any]) -> RunConfig:
    from omegaconf import OmegaConf

    return build_config([OmegaConf.create(recipe)])


def measured(results: dict[str, Any], name: str) -> Any:
    assert "error" not in results[name], results[name]["error"]
    return results[name]["values"]


def part_of(name: str) -> str:
    if "norm" in name:
        return "norms"
    if "self_attention" in name:
        return "attention"
    return "mlp" if ".mlp." in name else name.split(".")[0].replace("_layer", "")


@pytest.mark.parametrize("name", RUNS)
def test_parameters_are_counted_exactly_by_part(
    results: dict[str, Any], recipes: dict[str, Any], name: str
) -> None:
    config = config_of(recipes[name])
    for rank, values in enumerate(measured(results, name)):
        stage = rank if config.parallel.pp > 1 else 0
        expected = rank_parameters(config, stage)
        if stage and config.model.tie_embeddings:  # the copy has the embedding's name
            expected["embedding"] = expected.pop("output")
        counted = dict.fromkeys(expected, 0)
        for parameter, shape in values["parameters"].items():
            counted[part_of(parameter)] += math.prod(shape)
        assert counted == expected
    if config.parallel.model_size == 1:
        assert sum(model_parameters(config).values()) == sum(expected.values())


@pytest.mark.parametrize("name", RUNS)
def test_bytes_of_weights_gradients_and_optimizer(
    results: dict[str, Any], recipes: dict[str, Any], name: str
) -> None:
    run = dry_run(config_of(recipes[name]))
    for rank, values in enumerate(measured(results, name)):
        memory = run.memory[rank if len(run.memory) > 1 else 0]
        assert memory.weights == pytest.approx(values["weights"], rel=0.01)
        assert memory.gradients == pytest.approx(values["gradients"], rel=0.01)
        assert memory.optimizer == pytest.approx(values["optimizer"], rel=0.01)


@pytest.mark.parametrize("name", [n for n in RUNS if not n.startswith("pp2")])
def test_kept_activations(results: dict[str, Any], recipes: dict[str, Any], name: str) -> None:
    config = config_of(recipes[name])
    tokens = config.data.seq_length // config.parallel.cp
    estimate = activation_bytes(config, tokens, dp=1, stage=0, fused=ON_CPU)
    if name == "full":  # kept by autograd: without the layer that is computed again in backward
        estimate -= layer_bytes(config, tokens, fused=ON_CPU)
    if name == "sdpa":  # the graph of one microbatch: its boolean mask is not in it, nor the others
        estimate -= MASKS_KEPT * tokens * tokens
    for values in measured(results, name):
        assert estimate == pytest.approx(values["activations"], rel=0.05)


@pytest.mark.parametrize("name", PEAKS)
def test_what_a_step_allocates(results: dict[str, Any], recipes: dict[str, Any], name: str) -> None:
    run = dry_run(config_of(recipes[f"peak_{name}"]))
    memory = rank_memory(run.config, run.plan, run.dp, stage=0, fused=ON_CPU)
    estimate = memory.total - memory.weights - memory.gradients - memory.optimizer
    assert estimate == pytest.approx(max(measured(results, f"peak_{name}")), rel=0.1)


def test_plan_work_and_area_are_those_of_the_first_batch(
    recipes: dict[str, dict[str, Any]],
) -> None:
    config = config_of({**recipes["plain"], "parallel": {"cp": 4}})
    run = dry_run(config)
    dataset = PackedDataset(config.data, config.train.seed)
    masks = [
        from_cu_seqlens(dataset[n].cu_seqlens, causal=True)
        for n in range(config.train.global_batch_size)
    ]
    assert run.area == sum(mask.area() for mask in masks)
    assert run.plan is not None and run.plan.mask == masks[0]
    rows = run.plan.rows_received
    kv = 2 * config.model.num_query_groups * config.model.kv_channels
    most = int(rows.max()) + run.plan.layout.num_local_tokens
    assert 0 < receive_bytes(config, run.plan) <= 2 * 4 * kv * most
    assert run.tokens == 2 * 128
    assert run.epochs == pytest.approx(6 * 2 / dataset.samples_per_epoch)
    one, three = run.step_seconds(0.5, 100.0), run.step_seconds(0.5, 300.0)
    assert one == pytest.approx(run.flops / (4 * 50e12)) and three == pytest.approx(one / 3)


def test_the_first_batch_is_the_one_that_the_run_begins_with(
    recipes: dict[str, dict[str, Any]],
) -> None:
    """With data.balance_steps its samples come from several steps."""
    plain = {**recipes["plain"], "magi": {"costs": {"tile_q": 8, "tile_k": 8}}}
    moved = config_of({**plain, "data": {**plain["data"], "balance_steps": 4}})
    dataset = PackedDataset(moved.data, moved.train.seed)
    numbers = [sample_order(dataset, moved, 1)(n) for n in range(moved.train.global_batch_size)]
    areas = [from_cu_seqlens(dataset[n].cu_seqlens, causal=True).area() for n in numbers]
    assert dry_run(moved).area == sum(areas) != dry_run(config_of(plain)).area


def test_a_transport_that_not_every_machine_has_is_named(
    recipes: dict[str, dict[str, Any]],
) -> None:
    recipe = {**recipes["plain"], "parallel": {"cp": 2}}
    recipe["train"] = {**recipe["train"], "dtype": "bf16"}
    for transport, is_named in (("symm_mem", True), ("auto", False)):
        run = dry_run(config_of({**recipe, "magi": {"transport": transport}}))
        assert ("transport symm_mem: needs Hopper" in report(run, 0.4, 989.0)) == is_named


def test_without_data_documents_are_assumed(recipes: dict[str, dict[str, Any]]) -> None:
    recipe = {**recipes["plain"], "data": {"path": "nowhere", "seq_length": 4096}}
    run = dry_run(config_of(recipe))
    assert run.epochs is None
    assert "assumed documents (no data at nowhere)" in report(run, 0.4, 989.0)
    counts = [len(assumed_sample(run.config, n).cu_seqlens) - 1 for n in range(50)]
    assert 4 < np.mean(counts) < 16
    again = assumed_sample(run.config, 0).cu_seqlens
    assert np.array_equal(assumed_sample(run.config, 0).cu_seqlens, again)


def test_the_1b_recipe_is_1_24_billion_parameters() -> None:
    run = dry_run(
        load_recipe(
            ROOT / "recipes" / "own_trainer" / "llama3_1b_4gpu_cp4.yaml", ["data.path=nowhere"]
        )
    )
    assert sum(model_parameters(run.config).values()) == 1_235_814_400
    text = report(run, 0.4, 989.0)
    assert "parameters  1,235,814,400: embedding 262,668,288" in text
    assert "4 processes: tp 1 pp 1 cp 4 dp 1, distributed optimizer" in text
    sharded = rank_memory(run.config, run.plan, 1, 0)
    assert sharded.optimizer == 12 * 1_235_814_400 // 4


def test_errors_of_the_start_are_errors_of_the_dry_run(recipes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="needs a whole checkpoint"):
        dry_run(config_of({**recipes["plain"], "checkpoint": {"load": "latest"}}))
    with pytest.raises(RecipeError, match="number of processes must be"):
        dry_run(config_of({**recipes["plain"], "parallel": {"cp": 2}}), world_size=3)


def test_the_script_starts_nothing_and_imports_no_megatron(recipes: dict[str, Any]) -> None:
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'megatron.core' not in sys.modules"
    )
    data = recipes["plain"]["data"]["path"]
    script = [
        str(ROOT / "scripts" / "pretrain.py"),
        str(ROOT / "recipes" / "own_trainer" / "tiny_llama_cpu.yaml"),
    ]
    ran = subprocess.run(
        [sys.executable, "-c", code, *script, "--dry-run", "--mfu", "0.5", f"data.path={data}"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    assert "dry run: nothing was started" in ran.stdout
    assert "time        unknown: no rate is assumed for fp32; pass --peak-tflops N" in ran.stdout
    assert "989" not in ran.stdout


def test_a_rate_is_assumed_for_bf16_alone(recipes: dict[str, dict[str, Any]]) -> None:
    recipe = {**recipes["plain"], "train": {**recipes["plain"]["train"], "dtype": "bf16"}}
    assert "at 50 % of 989 TFLOP/s a rank (dense bf16 of an H100 or H200)," in report(
        dry_run(config_of(recipe)), 0.5
    )
    plain = dry_run(config_of(recipes["plain"]))
    assert "at 50 % of 0.1 TFLOP/s a rank," in report(plain, 0.5, 0.1)


def test_a_transport_that_one_rank_does_not_use_is_named(recipes: dict[str, Any]) -> None:
    run = dry_run(config_of({**recipes["plain"], "magi": {"transport": "symm_mem"}}))
    assert run.plan is not None and run.plan.cp_size == 1
    assert "transport symm_mem is not used: one rank exchanges nothing" in report(run, 0.4)
    assert "symm_mem" not in report(dry_run(config_of(recipes["plain"])), 0.4)
