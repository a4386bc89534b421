"""Megatron's pretrain scripts with TransformerEngine's layers (of a stand-in) and hybrid models.

The yardsticks are the same scripts without our switch, at context parallelism 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launcher.layouts import CP2, JOBS, MAGI, MLA, job, values, version_of
from tests.megatron_worker import run_jobs_of

STAND_INS = Path(__file__).parents[1] / "stand_ins"
TIMEOUT_S = 290
RELATIVE = {"loss": 1e-6, "grad_norm": 1e-5}
"""After four steps; a CPU with other sums than the first ones reached 5.4e-6 in the last norm."""

PP2 = {**MAGI, "pipeline-model-parallel-size": 2, "hybrid-layer-pattern": "*-|*E"}
# Half of the vocabulary's padding on twice the ranks is the same vocabulary.
TP2_SP_CP2 = {
    **CP2,
    "tensor-model-parallel-size": 2,
    "sequence-parallel": True,
    "make-vocab-size-divisible-by": 64,
}
ENGINE = {"transformer-impl": "transformer_engine"}
HYBRID = {
    "spec": ["megatron_magi.adapter.hybrid_spec", "hybrid_local_spec"],
    "hybrid-layer-pattern": "*-*E",
    "num-layers": None,
    "num-experts": 4,
    "moe-router-topk": 2,
    "moe-router-load-balancing-type": "none",
}

LATENT_LAYERS = {**MLA, "hybrid-layer-pattern": "+-+E"}
LATENT_PP2 = {"pipeline-model-parallel-size": 2, "hybrid-layer-pattern": "+-+|E", **MAGI}


def engine_hybrid() -> dict[str, Any]:
    """Flags of Megatron's own hybrid spec."""
    spec = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    return {**HYBRID, **ENGINE, "spec": spec, "moe-grouped-gemm": True}


@pytest.fixture(scope="module")
def local(megatron_checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    gpt, hybrid = megatron_checkout / "pretrain_gpt.py", megatron_checkout / "pretrain_hybrid.py"
    jobs = [
        job("stock", gpt),
        job("hybrid stock", hybrid, HYBRID),
        job("hybrid cp1", hybrid, HYBRID, MAGI),
        job("hybrid cp2", hybrid, HYBRID, CP2),
        job("hybrid pp2", hybrid, HYBRID, PP2),
        job("hybrid latent setting stock", hybrid, HYBRID, MLA),
        job("hybrid latent setting cp2", hybrid, HYBRID, MLA, CP2),
        job("hybrid latent setting pp2", hybrid, HYBRID, MLA, PP2),
        job("sparse", hybrid, HYBRID, MAGI, {"hybrid-layer-pattern": "*-DE"}),
        job("no engine", hybrid, engine_hybrid(), MAGI),
    ]
    if version_of(megatron_checkout) >= (0, 19):
        jobs += [
            # Megatron's own local attention cannot be in such a layer.
            job("latent layers stock", hybrid, HYBRID, LATENT_LAYERS, MAGI),
            job("latent layers cp2", hybrid, HYBRID, LATENT_LAYERS, CP2),
            job("latent layers pp2", hybrid, HYBRID, LATENT_LAYERS, LATENT_PP2),
        ]
    folder = tmp_path_factory.mktemp("local")
    return run_jobs_of(JOBS, jobs, folder, TIMEOUT_S, (megatron_checkout,))


@pytest.fixture(scope="module")
def engine(megatron_checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    gpt, hybrid = megatron_checkout / "pretrain_gpt.py", megatron_checkout / "pretrain_hybrid.py"
    stack = engine_hybrid()
    jobs = [
        job("te stock", gpt, ENGINE),
        job("te cp1", gpt, ENGINE, MAGI),
        job("te cp2", gpt, ENGINE, CP2),
        job("te tp2-sp-cp2", gpt, ENGINE, TP2_SP_CP2),
        job("te hybrid stock", hybrid, stack),
        job("te hybrid cp1", hybrid, stack, MAGI),
        job("te hybrid cp2", hybrid, stack, CP2),
        job("te hybrid pp2", hybrid, stack, PP2),
        job("te sparse", hybrid, stack, MAGI, {"hybrid-layer-pattern": "*-DE"}),
    ]
    folder = tmp_path_factory.mktemp("engine")
    return run_jobs_of(JOBS, jobs, folder, TIMEOUT_S, (STAND_INS, megatron_checkout))


def assert_equal(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for figure, relative in RELATIVE.items():
        assert len(values(wanted)[figure]) == 4
        assert values(got)[figure] == pytest.approx(values(wanted)[figure], rel=relative), figure


@pytest.mark.megatron_checkout
@pytest.mark.parametrize("name", ["te stock", "te cp1", "te cp2", "te tp2-sp-cp2"])
def test_transformer_engine_layers(
    local: dict[str, Any], engine: dict[str, Any], name: str
) -> None:
    assert_equal(engine[name], local["stock"])


@pytest.mark.megatron_checkout
def test_norms_and_linear_layers_are_kept(engine: dict[str, Any]) -> None:
    stock, ours = (set(values(engine[name])["modules"]) for name in ("te stock", "te cp2"))
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "RMSNorm"} < stock & ours
    assert stock - ours == {"TEDotProductAttention"}
    assert ours - stock == {"MagiCoreAttention"}


@pytest.mark.megatron_checkout
@pytest.mark.parametrize("name", ["hybrid cp1", "hybrid cp2", "hybrid pp2"])
def test_hybrid_model_without_transformer_engine(local: dict[str, Any], name: str) -> None:
    assert_equal(local[name], local["hybrid stock"])


@pytest.mark.megatron_checkout
@pytest.mark.parametrize("layout", ["cp2", "pp2"])
@pytest.mark.parametrize("kind", ["hybrid latent setting", "latent layers"])
def test_hybrid_model_beside_multi_latent_attention(
    local: dict[str, Any], kind: str, layout: str
) -> None:
    """`*` stays a plain layer with that setting, `+` is the MLA layer."""
    if f"{kind} stock" not in local:
        pytest.skip("the symbol + came with 0.19")
    assert_equal(local[f"{kind} {layout}"], local[f"{kind} stock"])


@pytest.mark.megatron_checkout
@pytest.mark.parametrize("name", ["stock", "cp1", "cp2", "pp2"])
def test_hybrid_model_of_transformer_engine(
    local: dict[str, Any], engine: dict[str, Any], name: str
) -> None:
    assert_equal(engine[f"te hybrid {name}"], local["hybrid stock"])


@pytest.mark.megatron_checkout
def test_sparse_layers_are_refused_before_they_are_built(
    local: dict[str, Any], engine: dict[str, Any]
) -> None:
    for result in (local["sparse"], engine["te sparse"]):
        assert "magi requires hybrid layers that follow the plan" in result["error"]


@pytest.mark.megatron_checkout
def test_absent_transformer_engine_is_named(local: dict[str, Any]) -> None:
    assert "requires TransformerEngine, got none" in local["no engine"]["error"]


@pytest.mark.parametrize(
    "given, text",
    [
        ({"hybrid_override_pattern": "D-"}, r"got D \(sparse attention\) in 'D-'.*leave them out"),
        (
            {"spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]},
            "requires TransformerEngine, got none; .* megatron_magi.adapter.hybrid_spec",
        ),
        ({"transformer_impl": "transformer_engine"}, "requires TransformerEngine, got none"),
    ],
)
def test_layers_that_do_not_work_end_in_one_line(given: dict[str, Any], text: str) -> None:
    from megatron_magi.launcher.constraints import refuse_arguments
    from tests.launcher.few_arguments import arguments

    refuse_arguments(arguments(hybrid_layer_pattern="*-|*E"))
    with pytest.raises(SystemExit, match=text):
        refuse_arguments(arguments(**given))
