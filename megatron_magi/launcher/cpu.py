"""Lets Megatron's training program run without CUDA, as `adapter.cpu` does for the core.

`megatron.training` asks for CUDA before it trains, reads properties of the device for its settings
and its log, runs `make` for helpers that a wheel has prebuilt, and warms up fusions that draw
random numbers whose count depends on the layout. Nothing here is active where CUDA is available.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.adapter.compat import REMEDY, write_checkpoints_in_process
from megatron_magi.adapter.cpu import install_cpu_runtime
from megatron_magi.adapter.monkeypatch import Swap, replace_everywhere


def install_cpu_training() -> bool:
    """Let `megatron.training` train on the CPU over gloo; True if it is active.

    Call it before the pretrain script runs. The run needs `--distributed-backend gloo
    --use-cpu-initialization --no-gradient-accumulation-fusion --transformer-impl local`.

    Raises:
        ImportError: a Megatron without its training program.
    """
    if not install_cpu_runtime():
        return False
    _describe_a_device()
    try:
        from megatron.training import initialize, training
    except ModuleNotFoundError as error:
        raise ImportError(no_training_program()) from error

    start = initialize.initialize_megatron
    if not isinstance(start, functools.partial):  # a patched script calls this a second time
        replace_everywhere(Swap(start, functools.partial(_initialize, start)))
    for owner in (initialize, training):
        owner.set_jit_fusion_options = do_nothing
    return True


def no_training_program() -> str:
    """Error line for a Megatron that has only `megatron.core`."""
    return (
        f"a pretrain script requires a Megatron with its training program (0.18 "
        f"to 0.20), got megatron-core {MEGATRON_VERSION} without it; {REMEDY}"
    )


def _initialize(start: Any, *args: Any, **kwargs: Any) -> Any:
    """Megatron's own start, without asking for CUDA, and saves as its arguments have them."""
    from megatron.training.global_vars import get_args

    result = start(*args, **{**kwargs, "allow_no_cuda": True})
    write_checkpoints_in_process(is_async=get_args().async_save)
    return result


def skip_compilation_of_wheels() -> None:
    """Keep a wheel's prebuilt dataset helpers: it has no Makefile, and Megatron stops without one.

    A source checkout is compiled as usual.
    """
    from megatron.core.datasets import utils

    if not (Path(utils.__file__).parent / "Makefile").exists():
        utils.compile_helpers = do_nothing


def do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _describe_a_device() -> None:
    """Device properties that Megatron reads: an architecture for its checks, sizes for its log."""
    device = SimpleNamespace(name="CPU", major=9, minor=0, total_memory=1 << 34)
    answers: dict[str, Any] = {
        "device_count": 1,
        "get_device_properties": device,
        "get_device_capability": (device.major, device.minor),
        "get_device_name": device.name,
        "mem_get_info": (device.total_memory, device.total_memory),
        "memory_stats": {},
        "is_current_stream_capturing": False,
        **dict.fromkeys(("set_stream", "empty_cache", "reset_peak_memory_stats")),
    }
    allocated = ("memory_allocated", "max_memory_allocated", "device_memory_used")
    answers |= dict.fromkeys((*allocated, "memory_reserved", "max_memory_reserved"), 0)
    for name, answer in answers.items():
        setattr(torch.cuda, name, functools.partial(_answer, answer))


def _answer(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value
