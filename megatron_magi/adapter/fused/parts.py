"""Which fused parts a run uses: Megatron's own where they suffice, otherwise ours."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_magi.adapter.fused.weight_grad import has_addmm, has_apex, install_addmm


@dataclass(frozen=True)
class FusedParts:
    """Where each part comes from; "plain" means Megatron's separate operations."""

    cross_entropy: Literal["triton", "te", "plain"] = "plain"
    """"triton": `cross_entropy.py`. "te": TransformerEngine's, by Megatron's flag."""
    swiglu: Literal["megatron", "plain"] = "plain"
    """"megatron": bias_activation_fusion, compiled by torch, which needs Triton."""
    qkv_rope: Literal["triton", "plain"] = "plain"
    """"triton": `qkv_rope.py`."""
    weight_grad: Literal["apex", "addmm", "plain"] = "plain"
    """What gradient_accumulation_fusion calls; "addmm": `weight_grad.py`."""

    def __str__(self) -> str:
        return (
            f"cross entropy {self.cross_entropy}, SwiGLU {self.swiglu}, QKV split and RoPE "
            f"{self.qkv_rope}, weight gradients {self.weight_grad}"
        )

    def config_fields(self) -> dict[str, Any]:
        """Fields of TransformerConfig that switch on those parts that Megatron provides."""
        fields: dict[str, Any] = {
            "bias_activation_fusion": self.swiglu == "megatron",
            "gradient_accumulation_fusion": self.weight_grad != "plain",
        }
        if self.cross_entropy == "te":
            fields |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
        return fields

    def install(self) -> None:
        """Prepare Megatron for the parts; call it before the model is built."""
        if self.weight_grad == "addmm":
            install_addmm()


def choose_parts(setting: Literal["auto", "off"]) -> FusedParts:
    """The parts that this machine can run; all are "plain" for "off" or without CUDA."""
    if setting == "off" or not torch.cuda.is_available():
        return FusedParts()
    has_triton = _importable("triton")
    return FusedParts(
        cross_entropy="te" if _importable("transformer_engine") else _triton(has_triton),
        swiglu="megatron" if has_triton else "plain",
        qkv_rope=_triton(has_triton),
        weight_grad="apex" if has_apex() else "addmm" if has_addmm() else "plain",
    )


def _triton(has_triton: bool) -> Literal["triton", "plain"]:
    return "triton" if has_triton else "plain"


def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
