"""Virtual pipeline stages with tied embeddings and multi-token prediction, by all three flags.

Megatron's first and last stage meet in an all-reduce of the tied embedding while others still
build, so the package must not communicate before the last model chunk exists: the guard raises.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launcher.layouts import (
    CP2,
    FOUR_LAYERS,
    MAGI,
    MTP,
    TIED,
    VIRTUAL_STAGES,
    Flags,
    assert_same_training,
    job,
    run_layouts,
    version_of,
)

pytestmark = [pytest.mark.megatron_checkout, pytest.mark.timeout(1800)]

GUARD = "forbid_our_communication_in_the_build"
EIGHT_LAYERS: Flags = {"num-layers": 8, "global-batch-size": 8, "train-iters": 2}
FOUR: Flags = {**FOUR_LAYERS, "train-iters": 2}
PER_TOKEN: Flags = {"calculate-per-token-loss": True}
WITH_MTP: Flags = {**MTP, "pipeline-model-parallel-layout": "Et|t|t|tmL"}
OF_EIGHT: Flags = {"pipeline-model-parallel-layout": "Et|t|t|t|t|t|t|tL"}


def chunked(name: str, pp: int) -> Flags:
    """The flags of one of the three ways, on `pp` pipeline stages of two model chunks each."""
    ways = VIRTUAL_STAGES if pp == 2 else {**VIRTUAL_STAGES, "layout": OF_EIGHT}
    return {"pipeline-model-parallel-size": pp, **ways[name]}


@pytest.fixture(scope="module")
def results(megatron_checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = megatron_checkout / "pretrain_gpt.py"
    jobs = [
        job("stock of pp2", script, FOUR, TIED),
        job("stock of pp4", script, EIGHT_LAYERS, TIED),
        *(
            job(f"{way} pp{pp} cp{cp}", script, layers, TIED, chunked(way, pp), ranks, damage=GUARD)
            for pp, layers in ((2, FOUR), (4, EIGHT_LAYERS))
            for cp, ranks in ((1, MAGI), (2, CP2))
            for way in VIRTUAL_STAGES
        ),
    ]
    if version_of(megatron_checkout) < (0, 20):
        jobs += [
            job("stock mtp", script, FOUR, TIED, MTP, PER_TOKEN),
            job("mtp cp1", script, FOUR, TIED, chunked("layout", 2), WITH_MTP, MAGI, damage=GUARD),
            job("mtp cp2", script, FOUR, TIED, chunked("layout", 2), WITH_MTP, CP2, damage=GUARD),
        ]
    return run_layouts(jobs, tmp_path_factory.mktemp("virtual"), megatron_checkout)


@pytest.mark.parametrize("way", VIRTUAL_STAGES)
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("pp", [2, 4])
def test_tied_embeddings_train_as_stock(
    results: dict[str, Any], pp: int, cp: int, way: str
) -> None:
    assert_same_training(results[f"{way} pp{pp} cp{cp}"], results[f"stock of pp{pp}"])


@pytest.mark.parametrize("cp", [1, 2])
def test_multi_token_prediction_trains_as_stock(results: dict[str, Any], cp: int) -> None:
    if "stock mtp" not in results:
        pytest.skip("0.20 builds no such layers without TransformerEngine")
    assert_same_training(results[f"mtp cp{cp}"], results["stock mtp"])
