"""Stand-ins of the packages cutlass and flash_attn.cute, whose kernels are the dense formula.

They take what FlashAttention-4 4.0.0b36 takes, refuse what it refuses, and visit only the blocks
that they are told to visit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.dense import capped


class Ssa:
    """A CuTe value: of one cell there, of all cells of a block here."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __getitem__(self, i: int) -> Tensor:
        assert i == 0
        return self.value

    def __ge__(self, other: Ssa) -> Ssa:
        return Ssa(self.value >= other.value)

    def __lt__(self, other: Ssa) -> Ssa:
        return Ssa(self.value < other.value)

    def __and__(self, other: Ssa) -> Ssa:
        return Ssa(self.value & other.value)

    def __or__(self, other: Ssa) -> Ssa:
        return Ssa(self.value | other.value)


class BlockSparseTensorsTorch(NamedTuple):
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


def visited_cells(
    shape: tuple[int, int], visible: Callable[..., Ssa], lists: BlockSparseTensorsTorch,
    intervals: list[Tensor], by_keys: bool,
) -> Tensor:  # fmt: skip
    """bool [T, S]: cells of full blocks, and those of partial ones that pass the test."""
    seen = torch.zeros(shape, dtype=torch.bool)
    height, width = lists.block_size
    outer = -(-shape[1] // width) if by_keys else -(-shape[0] // height)
    kinds = (lists[0], lists[1], False), (lists[2], lists[3], True)
    for counts, blocks, is_full in kinds:
        assert counts.dtype == blocks.dtype == torch.int32
        assert counts.shape == (1, 1, outer) and blocks.shape[:3] == (1, 1, outer)
        for i, count in enumerate(counts[0, 0].tolist()):
            for j in blocks[0, 0, i, :count].tolist():
                q, k = (j, i) if by_keys else (i, j)
                block = seen[q * height : (q + 1) * height, k * width : (k + 1) * width]
                assert not block.any(), "a block is visited twice"
                rows = q * height + torch.arange(height)[:, None]
                keys = k * width + torch.arange(width)[None]
                cells = visible(None, None, Ssa(rows), Ssa(keys), None, intervals).value
                block |= True if is_full else cells[: block.shape[0], : block.shape[1]]
                assert not is_full or cells[: block.shape[0], : block.shape[1]].all()
    return seen


def scores_of(q: Tensor, k: Tensor, scale: float, softcap: float, seen: Tensor) -> Tensor:
    """fp32 [H, T, S]"""
    keys = k[0].float().repeat_interleave(q.shape[2] // k.shape[2], 1)
    scores = capped(torch.einsum("thd,shd->hts", q[0].float(), keys) * scale, softcap)
    return scores.masked_fill(~seen, -torch.inf)


def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, softcap: float, mask_mod: Any,
    aux_tensors: list[Tensor], block_sparse_tensors: Any, pack_gqa: bool, return_lse: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    assert return_lse and not pack_gqa and q.dtype in (torch.bfloat16, torch.float16)
    seen = visited_cells(
        (q.shape[1], k.shape[1]), mask_mod, block_sparse_tensors, aux_tensors, False
    )
    scores = scores_of(q, k, softmax_scale, softcap, seen)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None].masked_fill(lse.isneginf()[..., None], 0.0)).exp()
    values = v[0].float().repeat_interleave(q.shape[2] // v.shape[2], 1)
    out = torch.einsum("hts,she->the", weights, values)
    return out.to(q.dtype)[None], lse[None], None, None, None


def _flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *,
    softmax_scale: float, softcap: float, mask_mod: Any, aux_tensors: list[Tensor],
    block_sparse_tensors: Any, dlse: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert q.dtype == k.dtype == v.dtype == out.dtype == dout.dtype
    assert lse.dtype == dlse.dtype == torch.float32
    assert lse.shape == dlse.shape == (1, q.shape[2], q.shape[1]) and out.shape == dout.shape
    seen = visited_cells(
        (q.shape[1], k.shape[1]), mask_mod, block_sparse_tensors, aux_tensors, True
    )
    keys, values = (x[0].float().repeat_interleave(q.shape[2] // x.shape[2], 1) for x in (k, v))
    scores = scores_of(q, k, softmax_scale, softcap, seen)
    weights = (scores - lse[0][..., None]).exp()
    delta = (out[0].float() * dout[0].float()).sum(-1).T - dlse[0]
    of_weights = torch.einsum("the,she->hts", dout[0].float(), values)
    of_scores = weights * (of_weights - delta[..., None])
    if softcap:
        of_scores = of_scores * (1 - (scores.masked_fill(~seen, 0.0) / softcap) ** 2)
    dq = torch.einsum("hts,shd->thd", of_scores, keys) * softmax_scale
    dk = torch.einsum("hts,thd->shd", of_scores, q[0].float()) * softmax_scale
    dv = torch.einsum("hts,the->she", weights, dout[0].float())
    dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(2) for x in (dk, dv))
    return tuple(x.to(q.dtype)[None] for x in (dq, dk, dv))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let imports of these packages find the stand-ins."""

    def module(name: str, **members: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, made)
        return made

    cute = module("cutlass.cute", jit=lambda function: function)
    module("cutlass", cute=cute, Int32=int, range_constexpr=range)
    utils = module("flash_attn.cute.utils", scalar_to_ssa=lambda value, dtype: Ssa(value))
    module("flash_attn.cute.block_sparsity", BlockSparseTensorsTorch=BlockSparseTensorsTorch)
    functions = {"_flash_attn_fwd": _flash_attn_fwd, "_flash_attn_bwd": _flash_attn_bwd}
    module("flash_attn.cute.interface", **functions)
    module("flash_attn", cute=module("flash_attn.cute", utils=utils))
    monkeypatch.delitem(sys.modules, "megatron_magi.core.kernel.fa4_mask_mod", raising=False)
