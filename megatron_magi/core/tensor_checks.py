"""Argument checks for tensors, devices and fill values; see ``checks.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_magi.checks import flag, instance, integer, number_or_infinite, shown


def tensor(value: Any, name: str) -> None:
    """Require a torch Tensor that is not nested, as those have no shape, and no DTensor."""
    instance(value, Tensor, name, "convert it, e.g. with torch.as_tensor")
    if hasattr(value, "to_local"):
        raise TypeError(
            f"{name} must be a plain tensor, got a {type(value).__name__}; pass x.to_local()"
        )
    if value.is_nested:
        raise TypeError(
            f"{name} must be a tensor with a shape, got a nested tensor; concatenate its parts, "
            f"e.g. documents along the tokens"
        )


def on_host(x: Tensor, name: str) -> Tensor:
    """The same values on the CPU, without a gradient.

    Raises:
        TypeError: a tensor that has no memory, or is sparse.
    """
    if x.is_meta or x.layout is not torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor with values, got {x.layout} on {x.device}; make it on "
            f"the CPU or a GPU"
        )
    return x.detach().cpu()


def device(value: Any, name: str = "device") -> torch.device:
    """Require a device, or the name of one, and return the device."""
    if not isinstance(value, (str, torch.device)):
        raise TypeError(f"{name} must be a torch device, got {shown(value)}; pass 'cpu' or 'cuda'")
    try:
        made = torch.device(value)
    except RuntimeError:
        raise ValueError(
            f"{name} must be a torch device, got {value!r}; pass 'cpu' or 'cuda'"
        ) from None
    if made.type == "cuda" and not 0 <= (made.index or 0) < torch.cuda.device_count():
        raise ValueError(
            f"{name} must be a torch device of this machine, got {value!r} with "
            f"{torch.cuda.device_count()} GPUs; pass 'cpu', or one of them"
        )
    return made


def fill(value: Any, x: Tensor, name: str) -> float | int | bool:
    """Require a value that x's dtype can hold: nan only in floats, 300 not in uint8."""
    if x.is_floating_point() or x.is_complex():
        return number_or_infinite(value, name)
    if x.dtype == torch.bool:
        return bool(value) if type(value) in (int, float) and value in (0, 1) else flag(value, name)
    # The default is 0.0 for tensors of any dtype.
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    limits = torch.iinfo(x.dtype)
    return integer(whole, f"{name} for {x.dtype}", int(limits.min), int(limits.max))
