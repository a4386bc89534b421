"""Layers with state (Mamba, gated delta net) on rows of our plans train as documents alone do.

Megatron's own layers run, on stand-ins that compute the definitions token by token. The yardstick
is stock: one process, and every document is a microbatch of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron_worker import run_jobs_of

STAND_INS = Path(__file__).parents[1] / "stand_ins" / "state"
JOBS = Path(__file__).parent / "adapter_jobs.py"
RELATIVE = 2e-5
LEAST_DAMAGE = 5e-4

SIZES = {
    "mamba_num_heads": 12,
    "mamba_head_dim": 8,
    "mamba_state_dim": 8,
    "mamba_num_groups": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
PATTERNS = {"mamba": "M-*M", "delta": "G-*G"}
ALONE = {"attention": "stock", "by_document": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp1": {},
    "cp2": {"cp": 2},
    "cp4": {"cp": 4},
    "tp2-sp-cp2": {"tp": 2, "sp": True, "cp": 2},
    "tp2-sp": {"tp": 2, "sp": True},
    "pp2-cp2": {"pp": 2, "cp": 2},
    "recompute": {"cp": 2, "recompute": "full"},
    "small chunks": {"cp": 2, "chunk_size": 3},
    "empty documents": {"cp": 2, "empty_documents": True},
}
DAMAGES = ("move_a_boundary", "join_documents", "restart_at_rank_borders", "order_of_zigzag")


def job(name: str, kind: str, groups: int = 4, **layout: Any) -> dict[str, Any]:
    pattern = PATTERNS[kind].replace("-*", "-|*") if layout.get("pp") else PATTERNS[kind]
    kwargs = {
        "name": name,
        "layers": "hybrid",
        "pattern": pattern,
        "settings": {**SIZES, "mamba_num_groups": groups},
        "steps": 3,
        "tile": 4,
        "adam_eps": 1e-3,  # else updates grow by the noise of gradients near 0
        **layout,
    }
    world = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
    return {"name": name, "function": "train", "kwargs": kwargs, "world": world}


def jobs_of(kind: str) -> list[dict[str, Any]]:
    alone = [job("alone", kind, **ALONE), job("alone padded", kind, seq_length=95, **ALONE)]
    padded = [job(f"padded {n}", kind, seq_length=95, **LAYOUTS[n]) for n in ("cp2", "tp2-sp")]
    same = [job(name, kind, **layout) for name, layout in LAYOUTS.items()]
    return alone + padded + same + [job(name, kind, cp=2, damage=name) for name in DAMAGES]


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = jobs_of("mamba")
    for groups, cp in ((3, 3), (1, 2)):
        jobs.append(job(f"alone {groups} groups", "mamba", groups, **ALONE))
        jobs.append(job(f"{groups} groups cp{cp}", "mamba", groups, cp=cp))
    return run_jobs_of(JOBS, jobs, tmp_path_factory.mktemp("mamba"), 500, (STAND_INS,))


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_jobs_of(JOBS, jobs_of("delta"), tmp_path_factory.mktemp("delta"), 500, (STAND_INS,))


def difference(results: dict[str, Any], name: str, alone: str) -> float:
    """The largest relative difference of a loss or a gradient norm, on any rank."""
    wanted = results[alone]["values"][0]
    assert all(len(wanted[figure]) == 3 for figure in ("loss", "grad_norm"))
    return max(
        abs(got - want) / abs(want)
        for each in results[name]["values"]
        for figure in ("loss", "grad_norm")
        for got, want in zip(each[figure], wanted[figure], strict=True)
    )


SHORT = {"alone": ALONE, "cp2": {"cp": 2}, "restart": {"cp": 2, "damage": DAMAGES[2]}}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = [
        job(f"{kind} {name}", kind, **layout) for kind in PATTERNS for name, layout in SHORT.items()
    ]
    return run_jobs_of(JOBS, jobs, tmp_path_factory.mktemp("short"), 280, (STAND_INS,))


@pytest.mark.parametrize("kind", PATTERNS)
def test_two_ranks_train_as_documents_alone(short: dict[str, Any], kind: str) -> None:
    """And a state that restarts at rank borders does not."""
    assert difference(short, f"{kind} cp2", f"{kind} alone") < RELATIVE
    assert difference(short, f"{kind} restart", f"{kind} alone") > LEAST_DAMAGE


@pytest.mark.slow
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_stream_trains_as_its_documents_alone(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    assert difference(request.getfixturevalue(kind), name, "alone") < RELATIVE


@pytest.mark.slow
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("name", ["padded cp2", "padded tp2-sp"])
def test_padding_is_a_document_of_its_own(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    assert difference(request.getfixturevalue(kind), name, "alone padded") < RELATIVE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["3 groups cp3", "1 groups cp2"])
def test_groups_of_heads_are_shared_by_ranks(mamba: dict[str, Any], name: str) -> None:
    assert difference(mamba, name, f"alone {name[0]} groups") < RELATIVE


@pytest.mark.slow
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_stream_trains_otherwise(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    assert difference(request.getfixturevalue(kind), name, "alone") > LEAST_DAMAGE
