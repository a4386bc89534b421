"""Attention of tokens whose queries, keys and values are looked up, so that gradients are whole.

The rows of a token do not depend on where it stands, so any order and any rank may compute them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

VOCAB, HEADS, KV_HEADS, HEAD_DIM = 97, 4, 2, 16
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def tables() -> list[Tensor]:
    """Queries, keys, values and weights of the output for every token; exact in bf16."""
    generator = torch.Generator().manual_seed(2)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    made = [torch.randn(VOCAB, n, HEAD_DIM, generator=generator).bfloat16().float() for n in heads]
    return [x.requires_grad_() for x in made]


def tokens(length: int) -> Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length))


def gradients(ids: Tensor, attend: Attend, dtype: torch.dtype) -> list[Tensor]:
    """Those of the tables, for these tokens; attend takes and gives [T, heads, D]."""
    made = tables()
    q, k, v = (table[ids].to(dtype) for table in made[:3])
    out = attend(q, k, v)
    assert out.dtype == dtype
    loss = (out.float() * made[3][ids]).sum()
    return list(torch.autograd.grad(loss, made))


def sdpa(mask: Tensor) -> Attend:
    """PyTorch's attention; mask: bool [T, T]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return out.transpose(0, 1)

    return attend


def documents(lengths: tuple[int, ...]) -> tuple[list[int], Tensor]:
    """(prefix sums, bool [T, T] causal inside of documents)."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    mask = torch.zeros(bounds[-1], bounds[-1], dtype=torch.bool)
    for start, end in pairwise(bounds):
        mask[start:end, start:end] = torch.ones(end - start, end - start).tril().bool()
    return bounds, mask


def assert_as_good(mine: list[Tensor], exact: list[Tensor], peers: list[Tensor]) -> None:
    """No farther from fp32 than one and a half times what SDPA is in bf16."""
    for got, want, peer in zip(mine, exact, peers, strict=True):
        error, allowed = (got - want).abs().max(), 1.5 * (peer - want).abs().max()
        floor = 1e-5 * want.abs().max()
        assert want.abs().max() > 20 * allowed  # a bound of that size says something
        assert error <= allowed + floor, f"{error} > {allowed}"


def assert_as_good_as_sdpa(mine: list[Tensor], ids: Tensor, mask: Tensor) -> None:
    """See assert_as_good."""
    exact, peers = (gradients(ids, sdpa(mask), x) for x in (torch.float32, torch.bfloat16))
    assert_as_good(mine, exact, peers)
