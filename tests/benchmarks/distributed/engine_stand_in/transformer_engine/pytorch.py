"""Attention over zigzag rows of all ranks: everything is gathered, and dense attention computed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor


class DotProductAttention:
    """The arguments and the layouts of TransformerEngine's class of this name.

    Shapes: packed rows [T, H, D] -> [T, H * D]; otherwise [T, 1, H, D] -> [T, 1, H * D].
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        *,
        num_gqa_groups: int,
        qkv_format: str,
        attn_mask_type: str,
        layer_number: int,
    ) -> None:
        self.group_size = num_attention_heads // num_gqa_groups
        self.is_packed = qkv_format == "thd"
        self.mask_type = attn_mask_type

    def set_context_parallel_group(self, group: Any, ranks: list[int], _: Any, method: str) -> None:
        """p2p refuses windows, as the package does."""
        self.group, self.ranks, self.method = group, ranks, method

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, window_size: tuple[int, int] = (-1, -1),
        cu_seqlens_q: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        if self.method == "p2p" and window_size[0] >= 0:
            raise AssertionError("p2p takes no window\nand says so on two lines")
        shape = q.shape[:-2]
        q, k, v = (x if self.is_packed else x.squeeze(1) for x in (q, k, v))
        total = len(q) * len(self.ranks)
        edges = [0, total] if cu_seqlens_q is None else cu_seqlens_q.tolist()
        rows, document = self._rows(edges)
        keys, values = (
            torch.cat(collectives.all_gather(x, self.group))[torch.argsort(torch.cat(rows))]
            .repeat_interleave(self.group_size, 1) for x in (k, v)
        )  # fmt: skip
        mine, everything = rows[dist.get_rank()], torch.arange(total)
        seen = document[mine][:, None] == document[None]
        if "causal" in self.mask_type:
            seen &= mine[:, None] >= everything
        if window_size[0] >= 0:
            seen &= mine[:, None] - everything <= window_size[0]
        scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(*shape, -1)

    def _rows(self, edges: list[int]) -> tuple[list[Tensor], Tensor]:
        """Rows of every rank, and the document of every row."""
        ranks = len(self.ranks)
        rows: list[list[Tensor]] = [[] for _ in self.ranks]
        for start, end in pairwise(edges):
            pieces = torch.arange(start, end).chunk(2 * ranks)
            for rank in self.ranks:
                rows[rank] += [pieces[rank], pieces[2 * ranks - 1 - rank]]
        lengths = torch.tensor(edges).diff()
        return [torch.cat(x) for x in rows], torch.arange(len(lengths)).repeat_interleave(lengths)
