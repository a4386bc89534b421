"""Run stock megatron-core on a machine without CUDA (gloo, CPU tensors)."""

from __future__ import annotations


def install_cpu_runtime() -> bool:
    """Make Megatron's literal CUDA calls mean the CPU; True if it is active.

    Does nothing where CUDA is available. Idempotent. Call it after `megatron_magi.adapter` can be
    imported and before a model, optimizer or schedule is built, in the main thread. The config
    needs use_cpu_initialization=True and gradient_accumulation_fusion=False.
    """
    raise NotImplementedError
