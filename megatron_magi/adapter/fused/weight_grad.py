"""Weight gradients added in fp32 by the matrix product that computes them.

Megatron's gradient_accumulation_fusion calls apex's `fused_weight_gradient_mlp_cuda`. If apex is
absent, torch's addmm with an fp32 output does the same. Without either, the product is rounded to
16 bits and added by another kernel.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import torch
from torch import Tensor

APEX_MODULE = "fused_weight_gradient_mlp_cuda"


def has_apex() -> bool:
    """True if apex's extension is importable."""
    return importlib.util.find_spec(APEX_MODULE) is not None


def has_addmm() -> bool:
    """True if this torch can add a 16-bit product into an fp32 matrix."""
    return hasattr(torch.ops.aten.addmm, "dtype_out")


def install_addmm() -> None:
    """Give Megatron's linear layers our functions under apex's name; a second call is harmless."""
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient
    )
    layers._grad_accum_fusion_available = True


def add_weight_gradient(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """main_grad += grad_output^T inputs.

    Args:
        inputs: [rows, inputs of the layer].
        grad_output: [rows, outputs], same dtype.
        main_grad: [outputs, inputs], float32 or the same dtype; changed in place.
    """
    if main_grad.dtype == inputs.dtype:
        torch.addmm(main_grad, grad_output.t(), inputs, out=main_grad)
    else:
        torch.addmm(main_grad, grad_output.t(), inputs, out_dtype=main_grad.dtype, out=main_grad)
