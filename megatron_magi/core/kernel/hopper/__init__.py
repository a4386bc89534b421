"""Attention by magi's CUDA kernels for Hopper (sm_90a)."""

from __future__ import annotations

import torch

from megatron_magi.core.cuda.library import load_kernels
from megatron_magi.core.kernel.hopper.backward import backward, delta
from megatron_magi.core.kernel.hopper.call_checks import check_device
from megatron_magi.core.kernel.hopper.forward import forward, prepared_forward

__all__ = ["HopperBackend"]


class HopperBackend:
    """The protocol ``AttnBackend`` on sm_90a.

    Raises (on construction):
        NotImplementedError: not a Hopper GPU, or a dtype without kernels.
        CudaBuildError: the library does not exist and cannot be built.
    """

    name = "cuda"
    adds_atomically = True
    finds_max_logits = True
    forward = staticmethod(forward)
    prepared_forward = staticmethod(prepared_forward)
    backward = staticmethod(backward)
    delta = staticmethod(delta)

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        check_device(device, dtype)
        load_kernels(device, dtype)
