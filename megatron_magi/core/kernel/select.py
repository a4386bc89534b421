"""Choosing the kernel backend."""

from __future__ import annotations

import functools
import logging
from typing import get_args

import torch

from megatron_magi.checks import word
from megatron_magi.config import KernelBackend
from megatron_magi.core.kernel.backend import AttnBackend

logger = logging.getLogger("megatron_magi")

BACKENDS = get_args(KernelBackend)


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def choose_backend_name(device: torch.device, dtype: torch.dtype, one_width: bool = True) -> str:
    """What "auto" means: cuda on Hopper, flex on other GPUs, reference on the CPU.

    float32 and float64 run on the reference everywhere, because the CUDA kernels take bf16 and
    fp16. They also need values as wide as keys (``one_width``); flex takes other widths.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "reference"
    return "cuda" if one_width and is_hopper(device) else "flex"


@functools.lru_cache(maxsize=64)
def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, one_width: bool = True
) -> AttnBackend:
    """The backend called ``name`` ("auto" chooses), logged when first chosen for its inputs.

    Args:
        one_width: values are as wide as keys; see ``has_one_width``.

    Raises:
        ValueError: unknown name.
        NotImplementedError: the named backend cannot run on this device, dtype or widths.
    """
    word(name, "kernel backend", BACKENDS)
    if name == "cuda" and not one_width:
        raise NotImplementedError(
            "the CUDA kernels take values as wide as queries and keys, got another width; "
            "use kernel_backend 'flex' or 'reference'"
        )
    chosen = choose_backend_name(device, dtype, one_width) if name == "auto" else name
    backend = _create(chosen, device, dtype)
    logger.info("attention kernel: %s (asked for %s) on %s, %s", chosen, name, device, dtype)
    return backend


def _create(name: str, device: torch.device, dtype: torch.dtype) -> AttnBackend:
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
    from megatron_magi.core.kernel.hopper import HopperBackend

    return HopperBackend(device, dtype)
