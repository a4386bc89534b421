"""What tests/adapter/layout_worker.py runs with the fused parts, interpreted on the CPU."""

from __future__ import annotations

from typing import Any

import training_jobs
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import mlp

from megatron_magi.adapter.fused.parts import FusedParts
from megatron_magi.training.run import log, model

TAKEN: list[str] = []
"""Parts that ran in this process."""


def train_fused(recipe: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """`training_jobs.train` with these parts, as on a GPU, and which of them ran."""
    forced = FusedParts(**parts)
    for module in (log, model):
        module.choose_parts = lambda setting: forced
    if forced.swiglu == "megatron":
        _note(mlp, "bias_swiglu_impl")
    if "triton" in parts.values():
        _note_triton_parts()
    install = FusedParts.install

    def and_note(self: FusedParts) -> None:
        install(self)
        if self.weight_grad == "addmm":
            _note(layers.fused_weight_gradient_mlp_cuda, "wgrad_gemm_accum_fp32")

    FusedParts.install = and_note
    return {"steps": training_jobs.train(recipe), "taken": sorted(set(TAKEN))}


def _note_triton_parts() -> None:
    from megatron_magi.adapter.fused import cross_entropy, qkv_rope

    _note(cross_entropy, "cross_entropy")
    _note(qkv_rope, "split_and_rotate")


def _note(owner: Any, name: str) -> None:
    function = getattr(owner, name)

    def noted(*args: Any) -> Any:
        TAKEN.append(name)
        return function(*args)

    setattr(owner, name, noted)
