"""Lets Bridge train without CUDA, as `launcher.cpu` does for Megatron's training program."""

from __future__ import annotations

import functools

from megatron_magi.launcher.cpu import (
    do_nothing,
    install_cpu_training,
    skip_compilation_of_wheels,
)


def install_cpu_bridge() -> bool:
    """Let Bridge's `pretrain` run on the CPU over gloo; True if it is active.

    Call it before `pretrain`. The config needs dist.distributed_backend="gloo" and the model
    use_cpu_initialization=True, gradient_accumulation_fusion=False and a local layer spec.
    """
    skip_compilation_of_wheels()
    if not install_cpu_training():
        return False
    from megatron.bridge.training import setup

    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    setup.set_jit_fusion_options = do_nothing
    return True
