"""Run stock megatron-core on a machine without CUDA (gloo, CPU tensors).

Megatron names the device "cuda" literally in about two hundred places. On a machine without CUDA
this shim makes those names mean the CPU, without changing Megatron's files:

- `device="cuda"`, `pin_memory=True`, `x.cuda()`, `x.to("cuda")`: one TorchFunctionMode rewrites the
  call. The same mode lets `p.type()` return "torch.cuda.FloatTensor", which optimizers ask for.
- `torch.cuda.current_device()`, `synchronize()`, streams and events: the CPU device and no-ops.
- CUDA RNG states: a private CPU generator, so that seeding "CUDA" does not change the CPU's own.
- MoE's `maybe_move_tensor_to_cpu` does nothing to a tensor outside CUDA: this one converts it.
- Small functions under torch.compile (`jit_fuser`): they run eagerly.

Nothing of this is active if `torch.cuda.is_available()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_active_mode: TorchFunctionMode | None = None


def install_cpu_runtime() -> bool:
    """Make Megatron's literal CUDA calls mean the CPU; return whether this is active.

    It does nothing if CUDA is available, and further calls change nothing. Call it in the main
    thread, before a model, optimizer or schedule is built. The config needs
    use_cpu_initialization=True and gradient_accumulation_fusion=False.
    """
    global _active_mode
    if torch.cuda.is_available():
        return False
    if _active_mode is None:
        _patch_torch_cuda()
        _patch_megatron()
        torch.compiler.set_stance("force_eager")
        _active_mode = _CudaMeansCpu()
        _active_mode.__enter__()
    return True


def _names_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites the arguments of torch calls that name the CUDA device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if kwargs:
            if _names_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": "cpu"}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


class _NoStream:
    """A stream or event on the CPU, where all earlier work is already done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, event: Any = None) -> _NoStream:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _patch_torch_cuda() -> None:
    generator = torch.Generator(device="cpu")
    replacements: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: _NoStream(),
        "default_stream": lambda device=None: _NoStream(),
        "stream": contextlib.nullcontext,
        "Stream": _NoStream,
        "Event": _NoStream,
        "manual_seed": generator.manual_seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.cuda.get_rng_state()

    def set_state(new_state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        torch.cuda.set_rng_state(new_state)

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    patches: list[tuple[Any, str, Any]] = [
        (megatron_random, "_get_cuda_rng_state", get_state),
        (megatron_random, "_set_cuda_rng_state", set_state),
        (moe_utils, "maybe_move_tensor_to_cpu", move_to_cpu),
        (token_dispatcher, "maybe_move_tensor_to_cpu", move_to_cpu),
    ]
    for module, name, value in patches:
        if not hasattr(module, name):
            raise ImportError(
                f"the CPU runtime requires {module.__name__}.{name}, which this megatron-core "
                f"does not have; use a supported version"
            )
        setattr(module, name, value)
