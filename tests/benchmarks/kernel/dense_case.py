"""A case of the kernel benchmark, written down densely."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.lib.cell import Case, Inputs

SEQLEN = 2048


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softcap: float = 0.0) -> Tensor:
    """Dense attention of [T, H, D] in fp32."""
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return (weights @ v).transpose(0, 1)


def expected(case: Case, direction: str, x: Inputs) -> tuple[Tensor, ...]:
    leaves = x.leaves()
    out = attend(*leaves, torch.from_numpy(case.mask.to_dense()), case.softcap)
    return (out,) if direction == "fwd" else torch.autograd.grad(out, leaves, x.dout)
