"""--magi-balance-step in two and four processes: the same steps, dealt to replicas by their cost.

The yardstick is the same job without the flag. Losses add up the tokens of a step, whichever
replica has its samples, so that they may differ by roundings alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import megatron_magi.adapter
from tests.launcher.layouts import (
    BY_CU_SEQLENS,
    BY_EOD,
    CP2,
    FOUR_LAYERS,
    JOBS,
    MAGI,
    PP2,
    SEQ_AUX,
    SMALL_SCRIPT,
    TP2_SP,
    VIRTUAL_STAGES,
    Flags,
    assert_same_training,
    error_of,
    job,
    values,
)
from tests.megatron_worker import run_jobs_of

pytestmark = pytest.mark.skipif(
    megatron_magi.adapter.MEGATRON_VERSION[:2] != (0, 19),
    reason="the script is written for megatron.training of the 0.19 wheel",
)

BALANCE: Flags = {"magi-balance-step": True}
STEPS: Flags = {"seq-length": 192, "global-batch-size": 8, "train-iters": 3, **BY_CU_SEQLENS}
FOUR_RANKS: Flags = {"context-parallel-size": 4}
DP2: Flags = {**MAGI, "world": 2}
FOUR: Flags = {**FOUR_LAYERS, "global-batch-size": 8}
WHOLE: Flags = {"dataloader-inter-document-masking": None}
GUARD = "forbid_our_communication_in_the_build"
VALIDATE: Flags = {"eval-iters": 1, "eval-interval": 2, "split": "90,10,0"}
CYCLIC: Flags = {"dataloader-type": "cyclic", "no-data-sharding": True}
SCHEDULE: Flags = {"global-batch-size": None, "step-batch-size-schedule": "0:4 1536:8"}
"""From the third step on twice as many samples; the limit is in tokens."""


def pair(name: str, *flags: Flags, damage: str | None = None) -> list[Flags]:
    """The job in Megatron's order, and dealt."""
    stock = job(f"{name} in order", SMALL_SCRIPT, STEPS, *flags, damage=damage)
    return [stock, job(name, SMALL_SCRIPT, STEPS, *flags, BALANCE, damage=damage)]


def run(folder: Path, make: Any) -> Flags:
    """Results of the jobs that `make` makes of the flags of data files and of a blend."""
    cache: Flags = {"data-cache-path": str(folder / "cache"), "mock-data": None}
    one, two = (str(folder / name) for name in ("one", "two"))
    corpora = [
        {
            "name": prefix,
            "function": "write_uneven_corpus",
            "kwargs": {"prefix": prefix, "seed": seed},
            "world": 1,
        }
        for seed, prefix in enumerate((one, two))
    ]
    split = {"split": "100,0,0"}
    data = {**cache, **split, "data-path": one}
    jobs = make(data, {**data, "data-path": ["0.3", one, "0.7", two]}, folder)
    return run_jobs_of(JOBS, [*corpora, *jobs], folder, 290)


def long(data: Flags, blend: Flags, folder: Path) -> list[Flags]:
    layers = VIRTUAL_STAGES["layers"]
    kept: Flags = {"save": str(folder / "kept"), "save-interval": 2, "ckpt-format": "torch_dist"}
    loaded: Flags = {"load": str(folder / "kept"), "ckpt-step": 2}
    joined: Flags = {"micro-batch-size": 2}
    return [
        *pair("pp2 vpp", data, PP2, FOUR, layers, damage=GUARD),
        *pair("pp2 dp2", data, PP2, FOUR, {"world": 2}),
        *pair("cp2 joined", data, CP2, {"world": 2}, joined),
        job("dp4", SMALL_SCRIPT, STEPS, data, MAGI, {"world": 4}),
        job("cp4 joined", SMALL_SCRIPT, STEPS, data, MAGI, FOUR_RANKS, {"micro-batch-size": 4}),
        *pair("tp2 dp2", data, MAGI, TP2_SP, {"world": 2}),
        *pair("schedule", data, DP2, SCHEDULE),
        *pair("workers", data, DP2, {"num-workers": 2}),
        *pair("shards", data, DP2, {"dataloader-type": "cyclic"}),
        *pair("eod", data, DP2, {"dataloader-inter-document-masking": None}, BY_EOD),
        *pair("experts", data, DP2, SEQ_AUX, {"expert-model-parallel-size": 2}),
        job("kept", SMALL_SCRIPT, STEPS, data, DP2, BALANCE, kept),
        job("resumed", SMALL_SCRIPT, STEPS, data, DP2, BALANCE, loaded),
        job("resumed cp2", SMALL_SCRIPT, STEPS, data, CP2, BALANCE, loaded),
    ]


def short(data: Flags, blend: Flags, folder: Path) -> list[Flags]:
    return [
        *pair("dp2", data, DP2, VALIDATE),
        *pair("cyclic blend", blend, DP2, CYCLIC),
        job(
            "one differs", SMALL_SCRIPT, STEPS, data, DP2, BALANCE, damage="keep_samples_on_rank_0"
        ),
        job("whole", SMALL_SCRIPT, STEPS, data, DP2, BALANCE, WHOLE),
        job("nothing", SMALL_SCRIPT, STEPS, data, DP2, BALANCE, {"global-batch-size": 2}),
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Flags:
    return run(tmp_path_factory.mktemp("balance"), short)


@pytest.fixture(scope="module")
def more_results(tmp_path_factory: pytest.TempPathFactory) -> Flags:
    return run(tmp_path_factory.mktemp("more"), long)


def steps(results: Flags, name: str, split: str = "train", sizes: list[int] | None = None) -> Any:
    """Sets of the sample numbers that the replicas read in every step."""
    read = [each["drawn"][split] for each in results[name]["values"]]
    per_step = sizes or [8 // len(read)] * 3
    found, at = [], 0
    for count in per_step:
        found.append(sorted(n for rank in read for group in rank[at : at + count] for n in group))
        at += count
    return found


def line(results: Flags, name: str) -> str:
    """What rank 0, and no other, says about the dealing; empty if nothing."""
    said, *others = (
        [x for x in each["output"].splitlines() if x.startswith("megatron_magi balance:")]
        for each in results[name]["values"]
    )
    assert len(said) <= 1 and not any(others)
    return "".join(said)


def assert_equal_steps(results: Flags, name: str) -> None:
    """Losses and gradient norms of the dealt job are those of the job in order."""
    ours, stock = results[name], results[f"{name} in order"]
    assert_same_training(ours, stock)
    assert values(ours)["grad_norm"] == pytest.approx(values(stock)["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("name", ["dp2", "cyclic blend"])
def test_dealt_steps_train_as_in_order(results: Flags, name: str) -> None:
    assert_equal_steps(results, name)
    assert steps(results, name) == steps(results, f"{name} in order")
    first = [results[each]["values"][0]["drawn"]["train"] for each in (name, f"{name} in order")]
    assert first[0] != first[1], "nothing was dealt"


def test_validation_is_dealt_too(results: Flags) -> None:
    sizes = [4, 4]
    wanted = steps(results, "dp2 in order", "valid", sizes)
    assert steps(results, "dp2", "valid", sizes) == wanted
    assert len(values(results["dp2"])["valid"]) >= 1


def test_one_line_says_what_was_dealt(results: Flags) -> None:
    said = line(results, "dp2")
    assert "8 samples a step over 2 replicas, fullest replica " in said
    before, after = (float(x) for x in said.split("replica ")[1].split(" of")[0].split(" -> "))
    assert 1 <= after < before
    assert "nothing to deal in the first step, which has one sample" in line(results, "nothing")
    assert line(results, "dp2 in order") == ""


def test_a_replica_that_deals_differently_is_an_error_everywhere(results: Flags) -> None:
    said = error_of(results, "one differs")
    line = "AgreementError: all ranks must deal the samples of a step alike, got dealing"
    assert said.count(line) == 2, "one on each rank"
    assert "on rank 1 and" in said and "train a sample twice" in said


LAYOUTS = ["pp2 vpp", "pp2 dp2", "cp2 joined", "tp2 dp2", "schedule", "workers", "shards", "eod"]
LAYOUTS.append("experts")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYOUTS)
def test_more_dealt_steps_train_as_in_order(more_results: Flags, name: str) -> None:
    assert_equal_steps(more_results, name)
    said = "8 samples a step, the cheapest" if name == "pp2 vpp" else "replicas, fullest replica"
    assert said in line(more_results, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shards", "eod", "experts", "cp2 joined"])
def test_more_steps_have_the_samples_of_megatron(more_results: Flags, name: str) -> None:
    sizes = [2] * 3 if name == "cp2 joined" else [4] * 3
    wanted = steps(more_results, f"{name} in order", sizes=sizes)
    assert steps(more_results, name, sizes=sizes) == wanted


@pytest.mark.slow
def test_a_schedule_of_batch_sizes_has_its_steps(more_results: Flags) -> None:
    sizes = [2, 2, 4]
    wanted = steps(more_results, "schedule in order", sizes=sizes)
    assert steps(more_results, "schedule", sizes=sizes) == wanted


@pytest.mark.slow
def test_a_run_that_is_loaded_goes_on_with_the_same_steps(more_results: Flags) -> None:
    whole, resumed, elsewhere = (
        values(more_results[name]) for name in ("kept", "resumed", "resumed cp2")
    )
    assert resumed["loss"] == whole["loss"][2:] and resumed["grad_norm"] == whole["grad_norm"][2:]
    assert elsewhere["loss"] == pytest.approx(whole["loss"][2:], rel=1e-6)


def test_samples_without_documents_are_refused_before_anything_is_built(results: Flags) -> None:
    said = error_of(results, "whole")
    assert "SystemExit: --magi-balance-step requires documents in a sample, got none" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cp4 joined", "cp2 joined in order"])
def test_joined_samples_train_as_replicas_do(more_results: Flags, name: str) -> None:
    """Four samples on four GPUs: one on each, or joined to streams of two or four ranks."""
    assert_same_training(more_results[name], more_results["dp4"])
