"""The parts of a layer beside attention: what they are given, and what they compute in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm, silu

EPS = 1e-5
ROTARY_BASE = 500_000

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """One microbatch of the 1B recipe, a batch of one sequence."""

    tokens: int = 8192
    hidden: int = 2048
    ffn: int = 8192
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
    parameters: tuple[Tensor, ...] = (),
) -> tuple[Tensor, ...]:
    """Outputs of a function of the tensors, and gradients of the tensors and the parameters.

    Outputs and leaves share memory with what they are made from, but are tensors of their own,
    since TransformerEngine empties those that it has used.
    """
    leaves = [x.detach().requires_grad_() for x in tensors]
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    kept = [x.detach() for x in outputs]
    return (*kept, *torch.autograd.grad(outputs, [*leaves, *parameters], grads))


def normal(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def words(sizes: Sizes, device: str) -> Tensor:
    """int64 [tokens, 1], as frequent as in a text: the word of rank n occurs in proportion to
    1/n."""
    uniform = torch.rand(sizes.tokens, 1, device=device, dtype=torch.float64)
    return (uniform * math.log(sizes.vocab + 1)).exp().long().clamp(max=sizes.vocab) - 1


def norm_inputs(sizes: Sizes, device: str) -> Tensors:
    shape = (sizes.tokens, 1, sizes.hidden)
    names = ("x", "residual", "dtotal", "dout")
    weight = 1 + normal(device, sizes.hidden) / 10
    zeros = torch.zeros(sizes.hidden, device=device)
    return {"weight": weight, "main_grad": zeros} | {n: normal(device, *shape) for n in names}


def exact_norm(sizes: Sizes, x: Tensors) -> tuple[Tensor, ...]:
    """The sum, its norm, the gradients of both addends, and the weight's in main_grad."""

    def function(a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, rms_norm(a + b, (sizes.hidden,), weight, EPS)

    inputs = [x[n].float() for n in ("x", "residual", "weight")]
    return both_ways(function, inputs, [x["dtotal"].float(), x["dout"].float()])


def swiglu_inputs(sizes: Sizes, device: str) -> Tensors:
    """Gates first, as Megatron's projection has them."""
    shape = (sizes.tokens, 1, sizes.ffn)
    mixed = normal(device, *shape[:-1], 2 * sizes.ffn)
    return {"mixed": mixed, "dout": normal(device, *shape)}


def exact_swiglu(sizes: Sizes, x: Tensors) -> tuple[Tensor, ...]:
    """The activation and the gradient of its input."""

    def function(mixed: Tensor) -> Tensor:
        gate, up = mixed.chunk(2, -1)
        return silu(gate) * up

    return both_ways(function, [x["mixed"].float()], [x["dout"].float()])


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


def embedding_inputs(sizes: Sizes, device: str) -> Tensors:
    """A weight and the fp32 matrix that its gradient is added to."""
    return {
        "weight": normal(device, sizes.vocab, sizes.hidden),
        "main_grad": torch.zeros(sizes.vocab, sizes.hidden, device=device),
        "words": words(sizes, device),
        "dout": normal(device, sizes.tokens, 1, sizes.hidden),
    }


def exact_embedding(sizes: Sizes, x: Tensors) -> tuple[Tensor, ...]:
    """The rows of the words, and main_grad."""
    rows = x["dout"].float().flatten(0, 1)
    main_grad = torch.zeros_like(x["main_grad"]).index_add_(0, x["words"].flatten(), rows)
    return x["weight"].float()[x["words"]], main_grad


PARTS = {
    "norm": Part(lambda s: 2 * s.layers, norm_inputs, exact_norm),
    "swiglu": Part(lambda s: s.layers, swiglu_inputs, exact_swiglu),
    "qkv_rope": Part(lambda s: s.layers, rope_inputs, exact_rope),
    "cross_entropy": Part(lambda s: 1, loss_inputs, exact_loss),
    "embedding": Part(lambda s: 1, embedding_inputs, exact_embedding),
}
