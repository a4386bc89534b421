"""What the distributed benchmark times on a rank: ours, its kernels alone, all-gather, one GPU.
The last two run on the kernel of their problem, ours or FlashAttention-3.

T tokens of this rank, S of the sequence, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_magi as magi
from benchmarks.distributed.flash import FlashKernel
from megatron_magi import AttnMask, HeadShape, MagiConfig
from megatron_magi.core.kernel.backend import AttnBackend, AttnCall, GradCall, OutLse
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.native import solver
from megatron_magi.core.plan import StagePlan

Grads = tuple[Tensor, Tensor, Tensor]
SIDES: tuple[Literal["queries", "keys"], ...] = ("queries", "queries", "keys", "keys")
"""Whose rows out, dq, dk and dv have."""

# The names of newer PyTorch, which warns of the older ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def gather(x: Tensor) -> Tensor:
    """The rows of all ranks, rank after rank."""
    out = x.new_empty(len(x) * dist.get_world_size(), *x.shape[1:])
    _all_gather(out, x)
    return out


def scatter(x: Tensor) -> Tensor:
    """This rank's part of the rows, summed over ranks in the dtype of ``x``."""
    out = x.new_empty(len(x) // dist.get_world_size(), *x.shape[1:])
    _reduce_scatter(out, x)
    return out


@dataclass(frozen=True)
class Problem:
    """A mask and the whole sequence, equal on every rank."""

    mask: AttnMask
    q: Tensor  # [S, H, D]
    k: Tensor  # [S, G, D]; another S in cross-attention
    v: Tensor  # [S, G, D]
    dout: Tensor  # [S, H, D]
    flash: FlashKernel | None = None  # the kernel instead of ours

    @classmethod
    def random(cls, mask: AttnMask, heads: HeadShape, like: Tensor) -> Problem:
        """``like``: any tensor of the wanted device and dtype."""
        gen = torch.Generator(like.device).manual_seed(0)
        of_q = (mask.total_seqlen_q, heads.num_heads_q, heads.head_dim)
        of_k = (mask.total_seqlen_k, heads.num_heads_kv, heads.head_dim)
        shapes = of_q, of_k, of_k, of_q
        return cls(mask, *(like.new_empty(s).normal_(generator=gen) for s in shapes))

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.q.shape[1], self.k.shape[1], self.q.shape[2])

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def kernel(self) -> AttnBackend | FlashKernel:
        return self.flash or select_backend("auto", self.q.device, self.q.dtype)


class CannotRun(Exception):
    """This implementation does not take this mask; says why."""


class Call(Protocol):
    """One forward, one backward; results as the timed code leaves them."""

    def forward(self) -> OutLse: ...

    def backward(self) -> Grads: ...

    def full(self) -> tuple[Tensor, ...] | None:
        """(out, dq, dk, dv) of the whole sequence, for comparison; None: no result to compare."""
        ...


class Ours:
    """dist_attn, forward and backward through autograd as a model calls it."""

    def __init__(self, x: Problem, config: MagiConfig) -> None:
        self.group = dist.group.WORLD
        self.plan = magi.plan(x.mask, self.group, x.heads, config)
        local = [
            magi.dispatch(t, self.plan, self.group, side=side)
            for t, side in zip((x.q, x.k, x.v), SIDES[1:], strict=True)
        ]
        self.dout = magi.dispatch(x.dout, self.plan, self.group)
        self.leaves = [t.detach().requires_grad_() for t in local]
        self.out, _ = magi.dist_attn(*self.leaves, self.plan, self.group)

    def forward(self) -> OutLse:
        with torch.no_grad():
            return magi.dist_attn(*self.leaves, self.plan, self.group)

    def backward(self) -> Grads:
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)

    def full(self) -> tuple[Tensor, ...]:
        parts = self.out.detach(), *self.backward()
        return tuple(
            magi.undispatch(t, self.plan, self.group, side=side)
            for t, side in zip(parts, SIDES, strict=True)
        )


class KernelsOnly:
    """The kernel calls of ``Ours`` on rows that are there already: what an endless wire gives."""

    def __init__(self, x: Problem, ours: Ours) -> None:
        self.kernel, self.scale = x.kernel(), x.scale
        self.q, self.k, _ = (t.detach() for t in ours.leaves)
        self.dout = ours.dout
        view = ours.plan.rank_plan(dist.get_rank())
        self.merges = view.forward_merges
        self.alone = len(view.stages) == 1 and view.stages[0].cast is None
        self.forward_stages = self._with_rows(view.forward_stages)
        same = view.stages is view.forward_stages
        self.stages = self.forward_stages if same else self._with_rows(view.stages)
        self.out, self.lse = self.forward()

    def _with_rows(self, stages: Sequence[StagePlan]) -> list[tuple[SliceTable, Tensor, Tensor]]:
        """Table, keys and values of every stage that sees something."""
        shape = self.k.shape[1:]
        return [
            (
                SliceTable(s.slices, len(self.q), s.num_keys, s.left_rows),
                torch.randn(s.num_keys, *shape, dtype=self.k.dtype, device=self.k.device),
                torch.randn(s.num_keys, *shape, dtype=self.k.dtype, device=self.k.device),
            )
            for s in stages
            if len(s.slices)
        ]

    def forward(self) -> OutLse:
        so_far: OutLse | None = None
        for table, k, v in self.forward_stages:
            given = {"prev" if self.merges else "into": so_far}
            dtype = torch.float32 if self.merges else self.q.dtype
            call = AttnCall(self.q, k, v, table, self.scale)
            so_far = self.kernel.forward(call, out_dtype=dtype, **given)
        assert so_far is not None
        return so_far

    def backward(self) -> Grads:
        dtype = self.q.dtype if self.alone else None
        out = self.out.to(self.q.dtype)
        delta, dq = self.kernel.delta(out, self.dout, self.lse.dtype), None
        for table, k, v in self.stages:
            call = AttnCall(self.q, k, v, table, self.scale)
            grad = GradCall(self.dout, self.lse, delta, dq=dq, dtype=dtype)
            dq, dk, dv = self.kernel.backward(call, grad)
        assert dq is not None
        return dq, dk, dv

    def full(self) -> None:
        return None


class AllGather:
    """Contiguous tokens, all keys and values to every rank, gradients by reduce-scatter in the
    dtype of q: the plain way. Keys are gathered again in backward, as in ours."""

    def __init__(self, x: Problem) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        tokens = x.mask.total_seqlen_q // ranks
        rows = slice(rank * tokens, (rank + 1) * tokens)
        self.q, self.k, self.v, self.dout = (t[rows].clone() for t in (x.q, x.k, x.v, x.dout))
        slices = solver.cut_slices(x.mask.slices, rows.start, rows.stop, 0, x.mask.total_seqlen_k)
        slices = slices - np.array([1, 1, 0, 0, -1, -1], np.int32) * rows.start
        self.table = SliceTable(slices, tokens, x.mask.total_seqlen_k)
        self.kernel, self.scale = x.kernel(), x.scale
        self.out, self.lse = self.forward()

    def forward(self) -> OutLse:
        k, v = gather(self.k), gather(self.v)
        return self.kernel.forward(AttnCall(self.q, k, v, self.table, self.scale))

    def backward(self) -> Grads:
        k, v = gather(self.k), gather(self.v)
        call = AttnCall(self.q, k, v, self.table, self.scale)
        grad = GradCall(self.dout, self.lse, out=self.out, dtype=self.q.dtype)
        dq, dk, dv = self.kernel.backward(call, grad)
        return dq, scatter(dk), scatter(dv)

    def full(self) -> tuple[Tensor, ...]:
        return tuple(gather(t) for t in (self.out, *self.backward()))


class OneGpu:
    """The whole mask on every GPU by itself: nothing travels. Ideal scaling keeps its rate."""

    def __init__(self, x: Problem) -> None:
        self.x, self.kernel = x, x.kernel()
        self.table = SliceTable.of(x.mask)
        self.out, self.lse = self.forward()

    def forward(self) -> OutLse:
        x = self.x
        return self.kernel.forward(AttnCall(x.q, x.k, x.v, self.table, x.scale))

    def backward(self) -> Grads:
        x = self.x
        call = AttnCall(x.q, x.k, x.v, self.table, x.scale)
        return self.kernel.backward(call, GradCall(x.dout, self.lse, out=self.out, dtype=x.q.dtype))

    def full(self) -> tuple[Tensor, ...]:
        return self.out, *self.backward()
