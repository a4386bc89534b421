"""A pretrain script on `megatron.training`, unchanged, through the launcher: one flag, any layout.

The yardstick is the same script without the flag, with Megatron's own dense attention.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

import megatron_magi.adapter
from tests.launcher.layouts import (
    BY_CU_SEQLENS,
    BY_EOD,
    CP2,
    CP2_PP2,
    CP3,
    DENSE_VIDEO,
    FOUR_LAYERS,
    JOBS,
    MAGI,
    MOE,
    ODD,
    PP2,
    PP4,
    SEQ_AUX,
    SHARDED,
    SMALL_SCRIPT,
    TIED,
    TP2_SP,
    TWO_SAMPLES,
    VALIDATE,
    VIDEO,
    VIRTUAL_STAGES,
    YARN,
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


def small(name: str, *flags: Any, damage: str | None = None) -> dict[str, Any]:
    return job(name, SMALL_SCRIPT, TWO_STEPS, *flags, damage=damage)


TWO_STEPS = {"train-iters": 2}
LAYERS, LAYOUT = VIRTUAL_STAGES["layers"], VIRTUAL_STAGES["layout"]
GRAPHS = "graphs_hold_attention"
GUARD = "forbid_our_communication_in_the_build"
MEANS = [BY_CU_SEQLENS, VALIDATE, {"split": "50,50,0", "eod-mask-loss": True}]
"""Ranks of one microbatch have different numbers of counted tokens."""
FOUR_SAMPLES = {"global-batch-size": 4, "calculate-per-token-loss": True}
"""The samples of TWO_SAMPLES, one in a microbatch."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = [
        small("stock", VALIDATE),
        small("cp1", MAGI, VALIDATE),
        small("cp2", CP2, VALIDATE, {"log-interval": 1}),
        small("stock odd", ODD, TWO_SAMPLES),
        small("cp3 odd", CP3, ODD, TWO_SAMPLES),
        small("cp2 pp2 odd", CP2_PP2, ODD, TWO_SAMPLES),
        small("tp2 sp cp2", CP2, TP2_SP),
        small("stock four layers", FOUR_LAYERS),
        small("pp4", PP4, FOUR_LAYERS),
        small("stock tied", FOUR_LAYERS, TIED),
        small("tied vpp", PP2, FOUR_LAYERS, TIED, LAYERS, damage=GUARD),
        small("cp2 tied layout", CP2_PP2, FOUR_LAYERS, TIED, LAYOUT, damage=GUARD),
        small("stock moe", MOE, {"calculate-per-token-loss": True}),
        small("cp2 moe", CP2, MOE),
        small("stock samples", YARN, SEQ_AUX, FOUR_SAMPLES),
        small("cp2 samples", CP2, YARN, SEQ_AUX, TWO_SAMPLES),
        small("captured odd", MAGI, ODD, TWO_SAMPLES, damage=GRAPHS),
        small("captured samples", MAGI, YARN, SEQ_AUX, TWO_SAMPLES, damage=GRAPHS),
        small("cp2 captured", CP2, VALIDATE, damage=GRAPHS),
        small("cp2 captured samples", CP2, YARN, SEQ_AUX, TWO_SAMPLES, damage=GRAPHS),
        small("stock video", DENSE_VIDEO),
        small("cp2 video", CP2, VIDEO),
    ]
    return run_jobs_of(JOBS, jobs, tmp_path_factory.mktemp("small"), 290)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("documents")
    corpus = {
        "data-path": str(folder / "corpus"),
        "mock-data": None,
        "split": "100,0,0",
        "data-cache-path": str(folder / "cache"),
    }
    jobs = [
        {
            "name": "corpus",
            "function": "write_corpus",
            "kwargs": {"prefix": str(folder / "corpus")},
            "world": 1,
        },
        small("stock by eod", corpus, BY_EOD),
        small("cp2 by eod", corpus, CP2, BY_EOD),
        small("cp1 by cu_seqlens", corpus, MAGI, BY_CU_SEQLENS),
        small("cp2 pp2 by cu_seqlens", corpus, CP2_PP2, BY_CU_SEQLENS, SHARDED),
        small("cp1 means", corpus, MAGI, *MEANS, damage="validate_as_sft_does"),
        small("cp2 means", corpus, CP2, *MEANS, damage="validate_as_sft_does"),
        small("whole", corpus, MAGI),
        small("no cu_seqlens", corpus, CP2_PP2, BY_CU_SEQLENS, damage="lose_cu_seqlens"),
        small("moved", corpus, CP2, BY_CU_SEQLENS, damage="move_a_boundary_on_rank_1"),
    ]
    return run_jobs_of(JOBS, jobs, folder, 290)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    bypassed = "leave_batches_to_megatron"
    jobs = [
        small("bypassed", CP2, damage=bypassed),
        small("early", PP2, damage="communicate_in_the_build"),
        small("bypassed cp1", MAGI, damage=bypassed),
        small("unattached", CP2, damage="forget_to_attach"),
        small("middle stage", PP4, FOUR_LAYERS, damage="plan_otherwise_on_middle_stages"),
        small("misspelt", {"attention-backend": "magic"}),
        small("our flag alone", {"magi-chunk-size": 8}),
        small("no such mask", MAGI, {"magi-mask": "video_mask:frame"}),
        small("no mask", MAGI, {"magi-mask": "video_mask:not_a_mask"}),
        small("two refused", CP2, ODD, {"attention-dropout": 0.1, "cuda-graph-impl": "local"}),
        small("a batch apart", CP2, damage="skip_a_sample_on_rank_1"),
        small("dropout", MAGI, {"attention-dropout": 0.1}),
        small("yaml", MAGI, {"yaml-cfg": "run.yaml"}),
    ]
    return run_jobs_of(JOBS, jobs, tmp_path_factory.mktemp("failures"), 290)


@pytest.mark.parametrize(
    ("name", "yardstick"),
    [
        ("cp1", "stock"),
        ("cp2", "stock"),
        ("cp3 odd", "stock odd"),
        ("cp2 pp2 odd", "stock odd"),
        ("pp4", "stock four layers"),
        ("tied vpp", "stock tied"),
        ("cp2 tied layout", "stock tied"),
        ("cp2 moe", "stock moe"),
        ("cp2 samples", "stock samples"),
        ("captured odd", "stock odd"),
        ("captured samples", "stock samples"),
        ("cp2 captured", "stock"),
        ("cp2 captured samples", "stock samples"),
        ("cp2 video", "stock video"),
    ],
)
def test_losses_are_those_of_stock_attention(
    results: dict[str, Any], name: str, yardstick: str
) -> None:
    assert_same_training(results[name], results[yardstick])


def test_validation_of_sft_is_that_of_whole_microbatches(documents: dict[str, Any]) -> None:
    assert len(values(documents["cp1 means"])["valid"]) == 2
    assert_same_training(documents["cp2 means"], documents["cp1 means"])


def test_tensor_and_sequence_parallelism(results: dict[str, Any]) -> None:
    stock = {**results["stock"], "values": [dict(v) for v in results["stock"]["values"]]}
    for each in stock["values"]:
        each.pop("valid")
    assert_same_training(results["tp2 sp cp2"], stock)


def test_the_mask_matters(results: dict[str, Any]) -> None:
    causal, video = (values(results[name])["loss"] for name in ("stock", "stock video"))
    assert abs(causal[0] - video[0]) > 1e-4


@pytest.mark.parametrize("name", ["cp2 by eod", "cp1 by cu_seqlens", "cp2 pp2 by cu_seqlens"])
def test_documents_are_masked(documents: dict[str, Any], name: str) -> None:
    assert_same_training(documents[name], documents["stock by eod"])


def test_documents_matter(documents: dict[str, Any]) -> None:
    masked, whole = (values(documents[name])["loss"] for name in ("stock by eod", "whole"))
    assert abs(masked[0] - whole[0]) > 1e-4


def test_one_line_says_what_runs(results: dict[str, Any]) -> None:
    first, second = results["cp2"]["values"]
    lines = [line for line in first["output"].splitlines() if line.startswith("megatron_magi")]
    assert lines[0].startswith("megatron_magi: --no-create-attention-mask-in-dataloader is set")
    assert lines[1].startswith("megatron_magi: --calculate-per-token-loss is set")
    assert lines[2].startswith(
        "megatron_magi active: kernel reference, transport all_to_all over gloo, cp 2, "
        "heads 4/2x16, "
    )
    assert re.search(r", documents not masked, [1-9]\d hooks$", lines[2])
    assert len(lines) == 3
    assert "megatron_magi" not in second["output"]
    assert "megatron_magi" not in results["stock"]["values"][0]["output"]


def test_the_line_says_which_documents_came(documents: dict[str, Any]) -> None:
    for name, source in (("cp2 by eod", "EOD"), ("cp1 by cu_seqlens", "cu_seqlens")):
        said = documents[name]["values"][0]["output"]
        assert re.search(rf"documents by {source} \([2-9] in the first microbatch\)", said)


def test_figures_are_in_the_log(results: dict[str, Any]) -> None:
    log = values(results["cp2"])["log"]
    assert log["magi imbalance"] == [1.0] * 2
    assert log["magi key rows received"] == [0.5] * 2
    assert all(0 < x < 10_000 for x in log["magi plan ms"])
    assert values(results["stock"])["log"] == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bypassed", "ValueError: with --attention-backend magi the model takes rows that magi's"),
        (
            "bypassed cp1",
            "ValueError: with --attention-backend magi the model takes rows that magi's",
        ),
        ("early", "AssertionError: __init__ was called while Megatron builds"),
        ("unattached", "RuntimeError: a model with MagiCoreAttention must be attached"),
        ("middle stage", "AgreementError: tensor- and pipeline-parallel ranks must plan the same"),
        ("no mask", "TypeError: the function of --magi-mask must return an AttnMask, got str"),
        ("a batch apart", "AgreementError: context-parallel ranks must take the same batch; ranks"),
        ("two refused", "requires attention_dropout=0.0, got 0.1 (--attention-dropout)"),
        ("two refused", "CUDA graphs without attention, got local over whole layers"),
        ("dropout", "requires attention_dropout=0.0, got 0.1 (--attention-dropout)"),
        ("yaml", "requires yaml_cfg=None, got 'run.yaml' (--yaml-cfg); write flags"),
    ],
)
def test_what_would_be_wrong_ends_with_its_name(
    failures: dict[str, Any], name: str, text: str
) -> None:
    assert text in error_of(failures, name)


def test_a_moved_boundary_ends_with_its_name(documents: dict[str, Any]) -> None:
    error = error_of(documents, "moved")
    assert "AgreementError: context-parallel ranks must plan the same thing" in error
    assert "differ from rank 0 in mask" in error


def test_promised_documents_that_do_not_come_end_every_rank(documents: dict[str, Any]) -> None:
    error = error_of(documents, "no cu_seqlens")
    assert error.count("require cu_seqlens in every sample, got a sample without") == 4


@pytest.mark.parametrize("name", ["misspelt", "our flag alone", "no such mask"])
def test_flags_that_do_not_parse_end_the_process(failures: dict[str, Any], name: str) -> None:
    assert "SystemExit: 2" in error_of(failures, name)
