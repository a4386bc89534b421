"""Choosing the kernel backend."""

from __future__ import annotations

import functools
import logging
from typing import get_args

import torch

from megatron_magi.checks import word
from megatron_magi.config import KernelBackend
from megatron_magi.core.kernel import flash4
from megatron_magi.core.kernel.backend import AttnBackend
from megatron_magi.core.kernel.head_dims import (
    COMPILED_WIDTHS,
    HeadDims,
    compiled_widths,
    too_wide,
)

logger = logging.getLogger("megatron_magi")

BACKENDS = get_args(KernelBackend)
ANY_WIDTHS = COMPILED_WIDTHS[0]
"""Head dims for callers that do not know their heads yet."""


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def choose_backend_name(
    device: torch.device, dtype: torch.dtype, widths: HeadDims = ANY_WIDTHS
) -> str:
    """The kernel that "auto" selects: cuda on Hopper, fa4 on Blackwell if it is installed, flex on
    other GPUs, reference on the CPU.

    float32 and float64 run on the reference everywhere, because the CUDA kernels take bf16 and fp16
    only. Heads that are too wide for the CUDA kernels or for fa4 (``widths``) run on flex.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "reference"
    if is_hopper(device) and compiled_widths(widths):
        return "cuda"
    if is_blackwell(device) and flash4.is_installed() and not flash4.why_not(widths, dtype):
        return "fa4"
    return "flex"


@functools.lru_cache(maxsize=64)
def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, widths: HeadDims = ANY_WIDTHS
) -> AttnBackend:
    """The backend called ``name`` ("auto" chooses), logged when first chosen for its inputs.

    Args:
        widths: of the heads that the backend will get.

    Raises:
        ValueError: unknown name.
        NotImplementedError: the named backend cannot run on this device, dtype or widths.
    """
    word(name, "kernel backend", BACKENDS)
    if name == "cuda" and compiled_widths(widths) is None:
        raise NotImplementedError(too_wide(widths))
    chosen = choose_backend_name(device, dtype, widths) if name == "auto" else name
    backend = _create(chosen, device, dtype, widths)
    logger.info("attention kernel: %s (asked for %s) on %s, %s", chosen, name, device, dtype)
    return backend


def _create(name: str, device: torch.device, dtype: torch.dtype, widths: HeadDims) -> AttnBackend:
    # Imported here: the GPU backends load compilers and libraries that a CPU user does not have.
    if name == "reference":
        from megatron_magi.core.kernel.reference import ReferenceBackend

        return ReferenceBackend()
    if device.type != "cuda":
        raise NotImplementedError(
            f"kernel backend {name!r} needs CUDA tensors, got {device}; "
            f"use 'auto' or 'reference' on the CPU"
        )
    if name == "flex":
        from megatron_magi.core.kernel.torch_flex import FlexBackend

        return FlexBackend()
    if name == "fa4":
        return _flash4(device, dtype, widths)
    from megatron_magi.core.kernel.hopper import HopperBackend

    return HopperBackend(device, dtype)


def _flash4(device: torch.device, dtype: torch.dtype, widths: HeadDims) -> AttnBackend:
    if reason := flash4.why_not(widths, dtype):
        raise NotImplementedError(reason)
    major = torch.cuda.get_device_capability(device)[0]
    if major not in flash4.CAPABILITIES:
        raise NotImplementedError(
            f"kernel backend 'fa4' needs a Hopper or Blackwell GPU, got compute capability "
            f"{major}.x; use 'flex'"
        )
    if not flash4.is_installed():
        raise NotImplementedError(
            "kernel backend 'fa4' needs the package flash-attn-4, got none; install it "
            "(pip install --pre flash-attn-4), or use 'flex'"
        )
    return flash4.Flash4Backend()
