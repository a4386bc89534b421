"""What one measurement of the kernel benchmark is, and what a peer has to offer for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from benchmarks.lib.masks import MASKS, Documents, as_documents
from megatron_magi import AttnMask
from megatron_magi.core.kernel.head_dims import HeadDims
from megatron_magi.core.kernel.slice_table import SliceTable

Direction = Literal["fwd", "bwd"]

Call = Callable[[], tuple[Tensor, ...]]
"""One forward or backward on the current stream: (out,) or (dq, dk, dv), all [tokens, heads, D]."""


@dataclass(frozen=True)
class Case:
    """A mask at a length, and what else is asked for."""

    name: str
    seqlen: int
    softcap: float = 0.0
    """0: logits are scaled scores. Otherwise they are softcap * tanh(scaled score / softcap)."""
    deterministic: bool = False
    """Whether gradients must have equal bits from run to run."""

    @cached_property
    def mask(self) -> AttnMask:
        return MASKS[self.name](self.seqlen)

    @cached_property
    def table(self) -> SliceTable:
        """One for both directions and all inputs: plans and block masks are made once."""
        return SliceTable.of(self.mask)

    @cached_property
    def documents(self) -> Documents | None:
        return as_documents(self.name, self.seqlen)

    def flops(self, heads: int, widths: HeadDims, direction: Direction) -> float:
        """Of the visible area: products over head_dim (QK; again, dQ, dK) and over value_dim (PV;
        dP, dV)."""
        products = (3, 2) if direction == "bwd" else (1, 1)
        columns = products[0] * widths.head_dim + products[1] * widths.value_dim
        return 2 * self.mask.area() * heads * columns


@dataclass(frozen=True)
class Inputs:
    """q [T, H, D], k [T, G, D], v [T, G, E], dout [T, H, E], bf16."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(
        cls, seqlen: int, heads: tuple[int, int], widths: HeadDims, device: str = "cuda"
    ) -> Inputs:
        if device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("a CUDA GPU is needed, got none; run this on one")
        (heads_q, heads_kv), (dim, value_dim) = heads, widths
        shapes = [(heads_q, dim), (heads_kv, dim), (heads_kv, value_dim), (heads_q, value_dim)]
        return cls(*(torch.randn(seqlen, *s, device=device, dtype=torch.bfloat16) for s in shapes))

    def of_size(self, size: float) -> Inputs:
        """With queries times ``size``: the standard deviation of the scaled scores."""
        return replace(self, q=self.q * size)

    def leaves(self) -> list[Tensor]:
        """q, k, v that autograd differentiates."""
        return [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]


class Peer(Protocol):
    """An implementation, by what it refuses and what it runs."""

    def missing(self) -> str | None:
        """Why it is not there at all; None: it is."""

    def refuses(self, case: Case, direction: Direction) -> str | None:
        """Why not, in a few words; None: it can be tried."""

    def call(self, case: Case, direction: Direction, x: Inputs) -> Call:
        """The work to be timed. Everything that a training step does once is done here."""


def autograd_call(attend: Callable[..., Tensor], direction: Direction, x: Inputs) -> Call:
    """A differentiable function of q, k, v on tensors that require gradients, or its
    torch.autograd.grad, as in a training loop."""
    leaves = x.leaves()
    if direction == "fwd":
        return lambda: (attend(*leaves),)
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, x.dout, retain_graph=True)
