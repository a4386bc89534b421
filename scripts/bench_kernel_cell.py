"""What one measurement of the kernel benchmark is, and what a peer has to offer for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from bench_kernel_masks import MASKS, Documents, as_documents
from torch import Tensor

from megatron_magi import AttnMask
from megatron_magi.core.kernel.slice_table import SliceTable

Direction = Literal["fwd", "bwd"]

Call = Callable[[], tuple[Tensor, ...]]
"""One forward or backward on the current stream: (out,) or (dq, dk, dv), all [tokens, heads, D]."""


@dataclass(frozen=True)
class Case:
    """A mask at a length."""

    name: str
    seqlen: int

    @cached_property
    def mask(self) -> AttnMask:
        return MASKS[self.name](self.seqlen)

    @cached_property
    def table(self) -> SliceTable:
        """One for both directions and all inputs: plans and block masks are made once."""
        return SliceTable(self.mask.slices, self.mask.total_seqlen_q, self.mask.total_seqlen_k)

    @cached_property
    def documents(self) -> Documents | None:
        return as_documents(self.name, self.seqlen)

    def flops(self, heads: int, dim: int, direction: Direction) -> float:
        """Of the visible area: two products forward, five backward."""
        return 4 * self.mask.area() * heads * dim * (2.5 if direction == "bwd" else 1)


@dataclass(frozen=True)
class Inputs:
    """q, dout [T, H, D], k, v [T, G, D], bf16."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(cls, seqlen: int, heads: tuple[int, int], dim: int, device: str = "cuda") -> Inputs:
        if device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("a CUDA GPU is needed, got none; run this on one")
        shapes = [(seqlen, h, dim) for h in (heads[0], heads[1], heads[1], heads[0])]
        return cls(*(torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes))

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


def autograd_call(
    attend: Callable[..., Tensor], case: Case, direction: Direction, x: Inputs
) -> Call:
    """The call of a peer that is one differentiable function of q, k, v."""
    if direction == "fwd":
        return lambda: (attend(x.q, x.k, x.v),)
    leaves = x.leaves()
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, x.dout, retain_graph=True)
