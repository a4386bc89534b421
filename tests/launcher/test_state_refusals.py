"""Megatron's hybrid pretrain script with Mamba and gated delta net layers, through the flag.

The layers are Megatron's own, on stand-ins that compute the definitions; the yardstick is the same
script without the flag, at context parallelism 1. Documents are compared with ours on one rank,
which tests/adapter/test_state_layers.py compares with every document alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.few_arguments import arguments
from tests.launcher.layouts import version_of
from tests.launcher.test_other_layers import (
    CP2,
    ENGINE,
    HYBRID,
    JOBS,
    MAGI,
    STAND_INS,
    engine_hybrid,
    job,
    values,
)
from tests.megatron_worker import run_jobs_of

RELATIVE = 2e-5
STATE = {
    "mamba-num-heads": 12,
    "mamba-head-dim": 8,
    "mamba-state-dim": 8,
    "mamba-num-groups": 4,
    "linear-num-key-heads": 4,
    "linear-num-value-heads": 8,
    "linear-key-head-dim": 8,
    "linear-value-head-dim": 8,
    "adam-eps": 1e-3,  # else updates grow by the noise of gradients near 0
}
MAMBA = {**HYBRID, **STATE, "hybrid-layer-pattern": "M*-E"}
DENSE = {**MAMBA, "num-experts": None, "moe-router-topk": None}  # 0.20 wants an E beside these
DELTA = {**DENSE, "hybrid-layer-pattern": "G*-M"}
PP2 = {"pipeline-model-parallel-size": 2, "hybrid-layer-pattern": "M-|*M"}
GRAPHS = "graphs_hold_attention"
DOCUMENTS = {"reset-attention-mask": True, "reset-position-ids": True, "eod-mask-loss": True}


@pytest.fixture(scope="module")
def runs(megatron_checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = megatron_checkout / "pretrain_hybrid.py"
    jobs = [
        job("mamba stock", script, MAMBA),
        job("mamba cp1", script, MAMBA, MAGI),
        job("mamba cp2", script, MAMBA, CP2),
        job("mamba joined stock", script, MAMBA, {"micro-batch-size": 2}),
        job("mamba joined cp2", script, MAMBA, CP2, {"micro-batch-size": 2}),
        job("mamba captured cp2", script, MAMBA, CP2, damage=GRAPHS),
        job(
            "mamba joined captured cp2", script, MAMBA, CP2, {"micro-batch-size": 2}, damage=GRAPHS
        ),
        job("mamba documents cp1", script, MAMBA, MAGI, DOCUMENTS),
        job("mamba documents cp2", script, MAMBA, CP2, DOCUMENTS),
        job("mamba pp2 stock", script, DENSE, {"hybrid-layer-pattern": "M-*M"}),
        job("mamba pp2 cp2", script, DENSE, CP2, PP2),
    ]
    if version_of(megatron_checkout) >= (0, 19):
        jobs += [
            job("delta stock", script, DELTA),
            job("delta cp2", script, DELTA, CP2),
            job("delta captured cp2", script, DELTA, CP2, damage=GRAPHS),
            job("delta documents cp1", script, DELTA, MAGI, DOCUMENTS),
            job("delta documents cp2", script, DELTA, CP2, DOCUMENTS),
        ]
    folder = tmp_path_factory.mktemp("state")
    return run_jobs_of(JOBS, jobs, folder, 580, (STAND_INS / "state", megatron_checkout))


@pytest.mark.megatron_checkout
@pytest.mark.parametrize(
    "name, wanted",
    [
        ("mamba cp1", "mamba stock"),
        ("mamba cp2", "mamba stock"),
        ("mamba joined cp2", "mamba joined stock"),
        ("mamba captured cp2", "mamba stock"),
        ("mamba joined captured cp2", "mamba joined stock"),
        ("mamba documents cp2", "mamba documents cp1"),
        ("mamba pp2 cp2", "mamba pp2 stock"),
        ("delta cp2", "delta stock"),
        ("delta captured cp2", "delta stock"),
        ("delta documents cp2", "delta documents cp1"),
    ],
)
def test_layers_with_state_through_the_flag(runs: dict[str, Any], name: str, wanted: str) -> None:
    if wanted not in runs:
        pytest.skip("gated delta net is refused before 0.19")
    for figure in ("loss", "grad_norm"):
        assert len(values(runs[wanted])[figure]) == 4
        expected = pytest.approx(values(runs[wanted])[figure], rel=RELATIVE)
        assert values(runs[name])[figure] == expected, figure


@pytest.fixture(scope="module")
def engine(megatron_checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Megatron's own specs of these layers, on a stand-in of TransformerEngine."""
    script = megatron_checkout / "pretrain_hybrid.py"
    mamba = {**engine_hybrid(), **MAMBA, **ENGINE, "spec": engine_hybrid()["spec"]}
    kinds = {"mamba": mamba}
    if version_of(megatron_checkout) >= (0, 20):
        product = [mamba["spec"][0], "gated_delta_product_stack_spec"]
        kinds["product"] = {**mamba, "spec": product, "gdp-num-householder": 2}
    jobs = []
    for kind, flags in kinds.items():
        jobs += [
            job(f"{kind} stock", script, flags),
            job(f"{kind} cp2", script, flags, CP2),
            job(f"{kind} documents cp1", script, flags, MAGI, DOCUMENTS),
            job(f"{kind} documents cp2", script, flags, CP2, DOCUMENTS),
        ]
    first = (STAND_INS, STAND_INS / "state", megatron_checkout)
    return run_jobs_of(JOBS, jobs, tmp_path_factory.mktemp("engine"), 580, first)


@pytest.mark.megatron_checkout
@pytest.mark.parametrize("name, wanted", [("cp2", "stock"), ("documents cp2", "documents cp1")])
@pytest.mark.parametrize("kind", ["mamba", "product"])
def test_specs_of_transformer_engine(
    engine: dict[str, Any], kind: str, name: str, wanted: str
) -> None:
    if f"{kind} stock" not in engine:
        pytest.skip("the gated delta product came with 0.20")
    for figure in ("loss", "grad_norm"):
        expected = pytest.approx(values(engine[f"{kind} {wanted}"])[figure], rel=RELATIVE)
        assert values(engine[f"{kind} {name}"])[figure] == expected, figure
    if kind == "product":
        assert "GatedDeltaProductMixer" in values(engine[f"{kind} {name}"])["modules"]


@pytest.mark.megatron_checkout
def test_documents_change_the_losses(runs: dict[str, Any]) -> None:
    joined, apart = (values(runs[f"mamba {kind}"])["loss"] for kind in ("cp2", "documents cp2"))
    assert joined != pytest.approx(apart, rel=1e-4)


@pytest.mark.parametrize(
    "given, texts",
    [
        ({"hybrid_layer_pattern": "D-"}, [r"got D \(sparse attention\) in 'D-'.*leave them out"]),
        ({"mamba_num_heads": 3}, [r"mamba_num_heads must be a multiple .* = 2, got 3: .*change"]),
        ({"mamba_num_heads": 12, "mamba_num_groups": 3}, ["mamba_num_groups must.*got 3 groups"]),
        ({"hidden_size": 96, "mamba_head_dim": 64}, ["mamba_num_heads must .* got 3"]),
        ({"use_mamba_mem_eff_path": False}, ["require use_mamba_mem_eff_path, got False"]),
        (
            {"hybrid_layer_pattern": "G*", "deterministic_mode": True, "linear_num_key_heads": 3},
            ["require deterministic_mode=False, got True", "linear_num_key_heads .* got 3"],
        ),
    ],
)
def test_settings_of_layers_with_state_end_in_a_line_each(
    given: dict[str, Any], texts: list[str]
) -> None:
    from megatron_magi.launcher.constraints import refusals

    lines = refusals(arguments(**{"hybrid_layer_pattern": "*-M", **given}), here=False)
    lines = [line for line in lines if "require Megatron 0.19" not in line]
    assert len(lines) == len(texts), lines
    for line, text in zip(lines, texts, strict=True):
        assert re.search(text, line) and "(--hybrid-layer-pattern)" in line


def test_layers_with_state_start() -> None:
    from megatron_magi.launcher.constraints import refusals

    assert refusals(arguments(hybrid_layer_pattern="*-ME"), here=False) == []


def test_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_magi.config import MagiConfig
    from megatron_magi.launcher import state_refusals

    packages = {"M": ("no_such_mamba", "json"), "G": ("no_such_fla",)}
    monkeypatch.setattr(state_refusals, "PACKAGES", packages)
    given = arguments(hybrid_layer_pattern="M*")
    (line,) = state_refusals.absent_packages(given, MagiConfig())
    assert "require no_such_mamba, json, got no no_such_mamba; install" in line
