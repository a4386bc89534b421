"""FlashAttention-3's functions below autograd, written down densely: what is asked of them is
checked, and what they leave alone is nan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor


def _sides(
    tokens: int, cu: Tensor | None, used: Tensor | None, longest: int | None
) -> Iterator[slice]:
    if cu is None:
        yield slice(0, tokens)
        return
    assert cu.dtype == torch.int32 and (used is None or used.dtype == torch.int32)
    counts = cu.diff() if used is None else used
    assert len(counts) == len(cu) - 1 and max(counts) == longest
    for begin, count in zip(cu.tolist(), counts.tolist(), strict=False):
        assert count >= 0 and 0 <= begin <= begin + count <= tokens
        yield slice(begin, begin + count)


def _apart(ranges: list[slice]) -> bool:
    return all(a.stop <= b.start for a, b in pairwise(ranges))


def _visible(rows: int, keys: int, causal: bool, left: int, right: int) -> Tensor:
    off = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
    assert not (causal and left >= 0), "one of both"
    seen = off <= 0 if causal else torch.ones(rows, keys, dtype=torch.bool)
    seen = seen & (off >= -left) if left >= 0 else seen
    return seen & (off <= right) if right >= 0 else seen


def _heads_first(x: Tensor, group: int = 1) -> Tensor:
    return x.double().transpose(0, 1).repeat_interleave(group, 0)


def _scores(q: Tensor, k: Tensor, scale: float, seen: Tensor) -> Tensor:
    scores = _heads_first(q) @ _heads_first(k, q.shape[1] // k.shape[1]).transpose(1, 2)
    return (scale * scores).masked_fill(~seen, -torch.inf)


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dense = cu_seqlens_q is None
    if dense:
        assert len(q) == len(k) == 1
        q, k, v = q[0], k[0], v[0]
    rows = list(_sides(len(q), cu_seqlens_q, seqused_q, max_seqlen_q))
    keys = list(_sides(len(k), cu_seqlens_k, seqused_k, max_seqlen_k))
    assert _apart(rows), "rows are written twice"
    out, lse = torch.full_like(q, torch.nan), q.new_full(q.shape[1::-1], torch.nan)
    for r, s in zip(rows, keys, strict=True):
        sizes = r.stop - r.start, s.stop - s.start
        seen = _visible(*sizes, causal, window_size_left, window_size_right)
        scores = _scores(q[r], k[s], softmax_scale, seen)
        weights = scores.softmax(-1).nan_to_num(0.0)
        made = weights @ _heads_first(v[s], q.shape[1] // k.shape[1])
        out[r], lse[:, r] = made.transpose(0, 1).to(q.dtype), scores.logsumexp(-1).to(q.dtype)
    empty = torch.tensor([])
    return (out[None], lse[None], empty, empty) if dense else (out, lse, empty, empty)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, sequed_q: Tensor | None,
    sequed_k: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None,
    dq: Tensor, dk: Tensor, dv: Tensor, softmax_scale: float, is_causal: bool,
    window_size_left: int, window_size_right: int,
) -> None:  # fmt: skip
    if cu_seqlens_q is None:
        dout, q, k, v, out, softmax_lse, dq, dk, dv = (
            x.squeeze(0) for x in (dout, q, k, v, out, softmax_lse, dq, dk, dv)
        )
    assert softmax_lse.shape == q.shape[1::-1] and softmax_lse.is_contiguous()
    rows = list(_sides(len(q), cu_seqlens_q, sequed_q, max_seqlen_q))
    keys = list(_sides(len(k), cu_seqlens_k, sequed_k, max_seqlen_k))
    assert _apart(rows) and _apart(keys), "gradients do not add up"
    group = q.shape[1] // k.shape[1]
    for r, s in zip(rows, keys, strict=True):
        sizes = r.stop - r.start, s.stop - s.start
        seen = _visible(*sizes, is_causal, window_size_left, window_size_right)
        lse = softmax_lse[:, r, None].double()
        scores = _scores(q[r], k[s], softmax_scale, seen)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
        given, delta = _heads_first(dout[r]), (dout[r].double() * out[r].double()).sum(-1)
        slopes = given @ _heads_first(v[s], group).transpose(1, 2) - delta.T[..., None]
        slopes = softmax_scale * weights * slopes
        dq[r] = (slopes @ _heads_first(k[s], group)).transpose(0, 1).to(q.dtype)
        for grad, x, y in ((dk, slopes, _heads_first(q[r])), (dv, weights, given)):
            of_heads = (x.transpose(1, 2) @ y).unflatten(0, (-1, group)).sum(1)
            grad[s] = of_heads.transpose(0, 1).to(q.dtype)
