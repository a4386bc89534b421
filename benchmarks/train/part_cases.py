"""Our fused parts beside attention: what they are given, and what they compute in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

ROTARY_BASE = 500_000

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """One microbatch of the 1B recipe, a batch of one sequence."""

    tokens: int = 8192
    heads: int = 32
    groups: int = 8
    head_dim: int = 64
    vocab: int = 128_256
    layers: int = 16


class Part(NamedTuple):
    """What an implementation is measured by."""

    calls: Callable[[Sizes], int]
    """How often a microbatch calls it."""
    inputs: Callable[[Sizes, str], Tensors]
    """Random ones on a device; an implementation may overwrite them, so it gets its own."""
    exact: Callable[[Sizes, Tensors], tuple[Tensor, ...]]
    """Outputs and gradients in fp32, as every implementation returns them."""


def both_ways(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: list[Tensor],
    grads: list[Tensor],
) -> tuple[Tensor, ...]:
    """Outputs of a function of the tensors, and gradients of the tensors.

    Outputs and leaves share memory with what they are made from, but are tensors of their own,
    since TransformerEngine empties those that it has used.
    """
    leaves = [x.detach().requires_grad_() for x in tensors]
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    kept = [x.detach() for x in outputs]
    return (*kept, *torch.autograd.grad(outputs, leaves, grads))


def normal(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def words(sizes: Sizes, device: str) -> Tensor:
    """int64 [tokens, 1], as frequent as in a text: the word of rank n occurs in proportion to
    1/n."""
    uniform = torch.rand(sizes.tokens, 1, device=device, dtype=torch.float64)
    return (uniform * math.log(sizes.vocab + 1)).exp().long().clamp(max=sizes.vocab) - 1


def rope_inputs(sizes: Sizes, device: str) -> Tensors:
    """The projection with each group's queries, key and value beside each other, and Megatron's
    angles, fp32 [tokens, 1, 1, head_dim]."""
    heads = {"dq": sizes.heads, "dk": sizes.groups, "dv": sizes.groups}
    grads = {n: normal(device, sizes.tokens, 1, h, sizes.head_dim) for n, h in heads.items()}
    width = (sizes.heads + 2 * sizes.groups) * sizes.head_dim
    channel = torch.arange(0, sizes.head_dim, 2, device=device) / sizes.head_dim
    half = torch.arange(sizes.tokens, device=device)[:, None] * ROTARY_BASE**-channel
    angles = torch.cat([half, half], -1)[:, None, None]
    return {"mixed": normal(device, sizes.tokens, 1, width), "angles": angles, **grads}


def split(sizes: Sizes, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [tokens, 1, heads, head_dim], k and v [tokens, 1, groups, head_dim], as Megatron makes
    them: k and v are views, q is copied if there are several groups."""
    of_group = sizes.heads // sizes.groups * sizes.head_dim
    grouped = mixed.view(*mixed.shape[:-1], sizes.groups, of_group + 2 * sizes.head_dim)
    q, k, v = grouped.split([of_group, sizes.head_dim, sizes.head_dim], -1)
    return q.reshape(*mixed.shape[:-1], sizes.heads, sizes.head_dim), k, v


def exact_rope(sizes: Sizes, x: Tensors) -> tuple[Tensor, ...]:
    """q and k rotated, v, and the gradient of the projection."""

    def rotated(t: Tensor) -> Tensor:
        low, high = t.chunk(2, -1)
        return t * x["angles"].cos() + torch.cat([-high, low], -1) * x["angles"].sin()

    def function(mixed: Tensor) -> tuple[Tensor, ...]:
        q, k, v = split(sizes, mixed)
        return rotated(q), rotated(k), v

    return both_ways(function, [x["mixed"].float()], [x[n].float() for n in ("dq", "dk", "dv")])


def loss_inputs(sizes: Sizes, device: str) -> Tensors:
    """Logits as Megatron has them, and another weight for every token's loss."""
    dloss = 0.5 + torch.rand(sizes.tokens, 1, device=device)
    logits = normal(device, sizes.tokens, 1, sizes.vocab)
    return {"logits": logits, "labels": words(sizes, device), "dloss": dloss}


def exact_loss(sizes: Sizes, x: Tensors) -> tuple[Tensor, ...]:
    """Losses, and the gradient of the logits."""

    def function(logits: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), x["labels"].flatten(), reduction="none")[:, None]

    return both_ways(function, [x["logits"].float()], [x["dloss"]])


PARTS = {
    "qkv_rope": Part(lambda s: s.layers, rope_inputs, exact_rope),
    "cross_entropy": Part(lambda s: 1, loss_inputs, exact_loss),
}
