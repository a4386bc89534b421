"""The other ways to share attention over ranks that users have, on our kernel or FlashAttention-3:
Ulysses and ring.

T rows of this rank, S of the sequence, R ranks, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.distributed.calls import Grads, Problem, gather
from benchmarks.distributed.flash import FlashKernel
from benchmarks.distributed.zigzag import ZigzagLayout
from megatron_magi import AttnMask
from megatron_magi.core.kernel.backend import AttnCall, GradCall, OutLse, acc_dtype
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.native import solver

Int32Array = npt.NDArray[np.int32]


def heads_to_tokens(x: Tensor) -> Tensor:
    """[S, N / R, D] of every rank -> [T, N, D]: all heads of this rank's rows."""
    ranks = dist.get_world_size()
    parts = torch.empty_like(x)
    dist.all_to_all_single(parts, x.contiguous())
    return parts.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)


def tokens_to_heads(x: Tensor) -> Tensor:
    """[T, N, D] of every rank -> [S, N / R, D]: this rank's heads of all rows."""
    ranks = dist.get_world_size()
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts)
    return out


class Ulysses:
    """Contiguous tokens; an all-to-all gives every rank all rows of its share of the heads, and
    another takes the result back. R must divide the number of key/value heads."""

    def __init__(self, x: Problem) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        tokens = x.mask.total_seqlen_q // ranks
        rows = slice(rank * tokens, (rank + 1) * tokens)
        self.local = [t[rows].clone() for t in (x.q, x.k, x.v)]
        self.dout = x.dout[rows].clone()
        self.table = SliceTable.of(x.mask)
        self.kernel, self.scale = x.kernel(), x.scale
        self.qkv = [tokens_to_heads(t) for t in self.local]  # what attention saves for backward
        self.out, self.lse = self.kernel.forward(AttnCall(*self.qkv, self.table, self.scale))

    def forward(self) -> OutLse:
        q, k, v = (tokens_to_heads(t) for t in self.local)
        out, lse = self.kernel.forward(AttnCall(q, k, v, self.table, self.scale))
        return heads_to_tokens(out), lse

    def backward(self) -> Grads:
        call = AttnCall(*self.qkv, self.table, self.scale)
        dout = tokens_to_heads(self.dout)
        grad = GradCall(dout, self.lse, out=self.out, dtype=dout.dtype)
        dq, dk, dv = self.kernel.backward(call, grad)
        return heads_to_tokens(dq), heads_to_tokens(dk), heads_to_tokens(dv)

    def full(self) -> tuple[Tensor, ...]:
        return tuple(gather(t) for t in (self.forward()[0], *self.backward()))


class Ring:
    """Keys and values of every rank go round in R steps, on the layout of `ZigzagLayout`; in the
    backward pass their fp32 gradients go round with them and end at their owner. A step sends
    while its kernel runs; steps whose rows see nothing launch no kernel, but all rows travel."""

    def __init__(self, x: Problem) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.layout = ZigzagLayout.of(x.mask, self.ranks)
        parts = (self.layout.local(t, self.rank) for t in (x.q, x.k, x.v, x.dout))
        q, k, v, self.dout = parts
        self.q, self.kv = q, torch.stack([k, v])
        slices = [self._slices(x.mask, self.source(step)) for step in range(self.ranks)]
        self.tables = [SliceTable(s, len(q), len(k)) if len(s) else None for s in slices]
        self.kernel, self.scale = x.kernel(), x.scale
        self.out, self.lse = self.forward()

    def source(self, step: int) -> int:
        """Whose keys are here in this step."""
        return (self.rank - step) % self.ranks

    def forward(self) -> OutLse:
        so_far: OutLse | None = None
        dtype = acc_dtype(self.q.dtype)
        for step, kv in self._steps():
            if (table := self.tables[step]) is not None:
                call = AttnCall(self.q, *kv, table, self.scale)
                so_far = self.kernel.forward(call, prev=so_far, out_dtype=dtype)
        assert so_far is not None, "a rank's rows see its own keys"
        return so_far[0].to(self.q.dtype), so_far[1]

    def backward(self) -> Grads:
        whole, dq = self._whole(), None
        going, arriving = None, None
        for step, kv in self._steps():
            dkv = torch.empty_like(kv, dtype=self.lse.dtype)
            if (table := self.tables[step]) is None:
                dkv.zero_()
            else:
                call = AttnCall(self.q, *kv, table, self.scale)
                grad = GradCall(self.dout, self.lse, dq=dq, dkv=(dkv[0], dkv[1]), **whole)
                dq, *_ = self.kernel.backward(call, grad)
            if going is not None and arriving is not None:
                _wait(going)
                dkv += arriving
            arriving = torch.empty_like(dkv)
            going = self._pass_on(dkv, arriving)
        assert dq is not None and going is not None and arriving is not None
        _wait(going)
        dk, dv = arriving.to(self.q.dtype)
        return dq.to(self.q.dtype), dk, dv

    def full(self) -> tuple[Tensor, ...]:
        order = torch.from_numpy(self.layout.natural_order()).to(self.q.device)
        real = order[: self.layout.num_rows]
        return tuple(gather(t).index_select(0, real) for t in (self.out, *self.backward()))

    def _whole(self) -> dict[str, Any]:
        """What a step needs of the final out."""
        if isinstance(self.kernel, FlashKernel):
            return {"out": self.out}
        return {"delta": self.kernel.delta(self.out, self.dout, self.lse.dtype)}

    def _steps(self) -> Iterator[tuple[int, Tensor]]:
        """Every step with the keys and values that are here; the next ones are on their way."""
        here = self.kv
        for step in range(self.ranks):
            there = torch.empty_like(here)
            going = self._pass_on(here, there) if step < self.ranks - 1 else []
            yield step, here
            _wait(going)
            here = there

    def _pass_on(self, x: Tensor, into: Tensor) -> list[dist.Work]:
        to, origin = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        if self.ranks == 1:
            into.copy_(x)
            return []
        ops = [dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, into, origin)]
        works: list[dist.Work] = dist.batch_isend_irecv(ops)
        return works

    def _slices(self, mask: AttnMask, source: int) -> Int32Array:
        """The mask of this rank's rows over the source's, both in their local order."""
        pieces = [np.zeros((0, 6), np.int32)]
        for q_local, q_row, q_len in self.layout.runs(self.rank):
            for k_local, k_row, k_len in self.layout.runs(source):
                cut = solver.cut_slices(mask.slices, q_row, q_row + q_len, k_row, k_row + k_len)
                down, right = q_local - q_row, k_local - k_row
                moved = np.array([down, down, right, right, right - down, right - down], np.int32)
                pieces.append(cut + moved)
        return np.concatenate(pieces)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
