"""Norm and clipping of all gradients at once, without a product, a copy and a wait for each.

Without TransformerEngine and apex, Megatron computes one norm after another and waits for each
value, and clips a gradient by a product and a copy. torch's foreach operations take a list of
tensors, read each once and write it once.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor


def has_own_clipping() -> bool:
    """Whether Megatron would take its local functions: neither TransformerEngine nor apex."""
    return not any(importlib.util.find_spec(name) for name in ("transformer_engine", "amp_C"))


def install_foreach() -> None:
    """Give Megatron's clipping our functions in place of its own; a second call is harmless."""
    from megatron.core.optimizer import clip_grads

    clip_grads.l2_norm_impl = l2_norm
    clip_grads.multi_tensor_scale_impl = scale


def l2_norm(
    chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], per_tensor: bool, *unused: Any
) -> tuple[Tensor, None]:
    """float32 [1]: the norm of all tensors of all lists together, by amp_C's arguments.

    A norm is computed in fp32 of tensors of any dtype; as a 16-bit one it might be infinite.
    """
    norms = [n for tensors in lists for n in torch._foreach_norm(tensors, 2, torch.float32)]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def scale(chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    """Tensors of the second list = those of the first * factor, by amp_C's arguments."""
    sources, targets = lists
    if not targets:  # torch's operations refuse an empty list
        return
    if any(a is not b for a, b in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)
