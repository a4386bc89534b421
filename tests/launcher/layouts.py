"""Jobs of launcher_jobs.py by name, and what their losses must be."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_worker import run_jobs_of

HERE = Path(__file__).parent
JOBS = HERE / "launcher_jobs.py"
SMALL_SCRIPT = HERE / "pretrain_small.py"

Flags = dict[str, Any]
MAGI: Flags = {"attention-backend": "magi"}
CP2: Flags = {**MAGI, "context-parallel-size": 2}
CP3: Flags = {**MAGI, "context-parallel-size": 3}
CP4: Flags = {**MAGI, "context-parallel-size": 4}
PP2: Flags = {**MAGI, "pipeline-model-parallel-size": 2}
CP2_PP2: Flags = {**CP2, "pipeline-model-parallel-size": 2}
TP2_SP: Flags = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
PP4: Flags = {**MAGI, "pipeline-model-parallel-size": 4}
FOUR_LAYERS: Flags = {"num-layers": 4, "global-batch-size": 4}
ODD: Flags = {"seq-length": 97}
TWO_SAMPLES: Flags = {"micro-batch-size": 2, "global-batch-size": 4}
BY_EOD: Flags = {"reset-attention-mask": True, "reset-position-ids": True}
BY_CU_SEQLENS: Flags = {"dataloader-inter-document-masking": True}
SHARDED: Flags = {"use-distributed-optimizer": True}
VALIDATE: Flags = {"eval-iters": 2, "eval-interval": 2}
MOE: Flags = {
    "num-experts": 4,
    "moe-router-topk": 2,
    "moe-router-load-balancing-type": "aux_loss",
    "moe-aux-loss-coeff": 0.1,
    "moe-z-loss-coeff": 0.01,
}
SEQ_AUX: Flags = {**MOE, "moe-router-load-balancing-type": "seq_aux_loss"}
YARN: Flags = {
    "position-embedding-type": "yarn",
    "rotary-scaling-factor": 4.0,
    "yarn-original-max-position-embeddings": 32,
    "mscale": 1.3,
}
SINK: Flags = {"softmax-type": "learnable"}
WINDOW: Flags = {"window-size": "17,0"}
TIED: Flags = {"untie-embeddings-and-output-weights": None}
VIRTUAL_STAGES: dict[str, Flags] = {
    "layers": {"num-layers-per-virtual-pipeline-stage": 1},
    "stages": {"num-virtual-stages-per-pipeline-rank": 2},
    "layout": {"pipeline-model-parallel-layout": "Et|t|t|tL"},
}
"""The three flags that ask for virtual pipeline stages; all mean PP 2 x 2 for four layers."""
MTP: Flags = {"mtp-num-layers": 1}
MLA: Flags = {
    "multi-latent-attention": True,
    "group-query-attention": None,
    "num-query-groups": None,
    "q-lora-rank": 24,
    "kv-lora-rank": 16,
    "qk-head-dim": 16,
    "qk-pos-emb-head-dim": 8,
    "v-head-dim": 12,
    "rope-type": "rope",
}
VIDEO: Flags = {"magi-mask": "video_mask:frames"}
DENSE_VIDEO: Flags = {"dense-mask": "video_mask:frames"}


def job(name: str, script: Path, *flags: Flags, damage: str | None = None) -> Flags:
    """One run of the script, on as many processes as its layout has ranks."""
    given = {name: value for each in flags for name, value in each.items()}
    world = given.pop("world", 1)
    for size in ("context-parallel-size", "pipeline-model-parallel-size"):
        world *= given.get(size, 1)
    world *= given.get("tensor-model-parallel-size", 1)
    kwargs = {"script": str(script), "flags": given, "damage": damage}
    return {"name": name, "function": "pretrain", "kwargs": kwargs, "world": world}


recorded: list[Flags] = []
"""What every run of `run_layouts` gave, for a record."""


def run_layouts(jobs: list[Flags], folder: Path, checkout: Path) -> Flags:
    """Results by name, with the checkout's Megatron."""
    results = run_jobs_of(JOBS, jobs, folder, 1500, (checkout,))
    for each in jobs:
        given = {"run": each["name"], "ranks": each["world"], **each["kwargs"]}
        ranks = [v for v in results[each["name"]].get("values", ()) if v and v.get("loss")]
        seen = {k: ranks[-1].get(k) for k in ("loss", "grad_norm", "valid")} if ranks else {}
        error = results[each["name"]].get("error", "").strip().splitlines()[-1:]
        recorded.append({**given, "script": Path(given.get("script", "")).name, **seen})
        if error:
            recorded[-1]["error"] = error[0]
    return results


def version_of(checkout: Path) -> tuple[int, int]:
    """(major, minor) of a Megatron-LM source tree."""
    info = runpy.run_path(str(checkout / "megatron" / "core" / "package_info.py"))
    return info["MAJOR"], info["MINOR"]


def values(result: Flags) -> Flags:
    """What the ranks that have losses returned; the last stage's where there are several."""
    assert "error" not in result, result["error"]
    return [each for each in result["values"] if each["loss"]][-1]


def assert_same_training(got: Flags, wanted: Flags, relative: float = 1e-6) -> None:
    """Every loss and gradient norm, read unrounded."""
    ours, theirs = values(got), values(wanted)
    assert len(theirs["loss"]) == len(ours["loss"]) > 0
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=relative)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=10 * relative)
    assert ours.get("valid", []) == pytest.approx(theirs.get("valid", []), rel=relative)


def error_of(results: Flags, name: str) -> str:
    assert "error" in results[name], f"{name} trained: {results[name]}"
    return results[name]["error"]
