"""A run with the fused parts against the same run without: names, losses and every gradient.

Triton's kernels are interpreted, Megatron's SwiGLU is not compiled, and the weight gradients'
product is in fp32, since a 16-bit one into fp32 exists on CUDA alone.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.megatron_worker import run_jobs_of

JOBS = Path(__file__).parent / "fused_jobs.py"
RELATIVE = 2e-5
HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="the fused kernels are Triton's")
TRITON = {"cross_entropy": "triton", "qkv_rope": "triton"}
MEGATRON = {"swiglu": "megatron", "weight_grad": "addmm"}
ALL = TRITON | MEGATRON
UNTIED = {"model": {"tie_embeddings": False}}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "plain": ({}, {}, ""),
    "plain_untied": ({}, UNTIED, ""),
    "megatron": (MEGATRON, {}, "plain"),
    "megatron_untied": (MEGATRON, UNTIED, "plain_untied"),
    "megatron_pp2": (MEGATRON, {"parallel": {"pp": 2}}, "plain"),
    "megatron_sharded": (
        MEGATRON,
        {"parallel": {"dp": 2, "distributed_optimizer": True, "overlap_grad_reduce": True}},
        "plain",
    ),
    "triton": (TRITON, {}, "plain"),
    "triton_full": (TRITON, {"train": {"recompute": "full"}}, "plain"),
    "triton_attention": (TRITON, {"train": {"recompute": "attention"}}, "plain"),
    "all_tp2_sp": (
        ALL,
        {"parallel": {"tp": 2, "sequence_parallel": True}},
        "plain",
    ),
    "all_cp2": (ALL, {"parallel": {"cp": 2}}, "plain"),
    "all_pp2": (ALL, {"parallel": {"pp": 2}}, "plain"),
    "all_sharded": (
        ALL,
        {
            "parallel": {
                "dp": 2,
                "distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
            }
        },
        "plain",
    ),
    "all_sdpa": (ALL, {"attention": "sdpa"}, "plain"),
}
"""Parts, sections of the recipe, and the run without parts that it must equal."""
CASES = [
    pytest.param(n, marks=[NEEDS_TRITON] if "triton" in parts.values() else [])
    for n, (parts, _, other) in RUNS.items()
    if other
]


@pytest.fixture(scope="module")
def results(folder: Path, tiny_recipe: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    def job(name: str, parts: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
        merged = {k: v for k, v in sections.items() if k not in ("model", "train")}
        recipe = tiny_recipe(
            name,
            folder,
            model={"init_std": 0.2, **sections.get("model", {})},
            train={"iterations": 3, "dump_gradients": [1], **sections.get("train", {})},
            **merged,
        )
        world = math.prod(v for k, v in recipe.get("parallel", {}).items() if len(k) == 2)
        kwargs = {"recipe": recipe, "parts": parts}
        return {"name": name, "function": "train_fused", "kwargs": kwargs, "world": world}

    wanted = {
        name: (parts, sections)
        for name, (parts, sections, _) in RUNS.items()
        if HAS_TRITON or "triton" not in parts.values()
    }
    jobs = [job(name, parts, sections) for name, (parts, sections) in wanted.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        return run_jobs_of(JOBS, jobs, folder, 280)


def steps(results: dict[str, Any], name: str) -> list[list[float]]:
    assert "error" not in results[name], results[name]["error"]
    rows = results[name]["values"][0]["steps"]
    assert isinstance(rows, list) and len(rows) == 3, rows
    return [[float.fromhex(r[1]), float.fromhex(r[2])] for r in rows]


def gradients(folder: Path, name: str) -> dict[str, Any]:
    (dump,) = (folder / name / "gradients").iterdir()
    return {path.stem: np.load(path) for path in dump.glob("*.npy")}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fused_parts_train_like_plain_operations(
    results: dict[str, Any], folder: Path, name: str
) -> None:
    _, _, plain = RUNS[name]
    got, want = steps(results, name), steps(results, plain)
    assert np.allclose(got, want, rtol=RELATIVE, atol=0), (got, want)
    ours, theirs = gradients(folder, name), gradients(folder, plain)
    assert sorted(ours) == sorted(theirs) and len(ours) > 10
    for parameter, exact in theirs.items():
        off = np.linalg.norm(ours[parameter] - exact)
        assert off <= RELATIVE * np.linalg.norm(exact), parameter


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_parts_really_ran(results: dict[str, Any], name: str) -> None:
    """On some rank: the first pipeline stage has no loss."""
    parts, _, _ = RUNS[name]
    wanted = []
    if "triton" in parts.values():
        wanted += ["cross_entropy", "split_and_rotate"]
    if parts.get("swiglu") == "megatron":
        wanted += ["bias_swiglu_impl", "wgrad_gemm_accum_fp32"]
    taken = {part for rank in results[name]["values"] for part in rank["taken"]}
    assert taken == set(wanted)
