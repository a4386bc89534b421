"""Attention on one device in which every group of key/value heads has a mask of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from megatron_magi.checks import instance
from megatron_magi.core.kernel.attention import AttnForwardMeta, flex_flash_attn_func
from megatron_magi.core.kernel.qkv_checks import check_qkv
from megatron_magi.core.kernel.sink import check_sink
from megatron_magi.core.mask import AttnMask

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AttnOptions(TypedDict, total=False):
    """The options of ``flex_flash_attn_func``: all but its tensors and its mask."""

    softmax_scale: float | None
    deterministic: bool
    backend: str
    out_dtype: torch.dtype | None
    return_max_logits: bool
    softcap: float


def flex_flash_attn_by_head_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Sequence[Tensor | AttnMask],
    *,
    sink: Tensor | None = None,
    **options: Unpack[AttnOptions],
) -> tuple[Tensor, AttnForwardMeta]:
    """``flex_flash_attn_func`` with one mask per group of key/value heads; differentiable.

    A group is a run of neighbouring heads: with G key/value heads and n masks, the first G / n
    heads and the query heads that read them get the first mask.

    Args:
        q: [T, H, D], as ``flex_flash_attn_func`` takes it.
        k: [S, G, D].
        v: [S, G, E].
        slices: one AttnMask or int32 [N, 6] per group, all for T queries and S keys. Pass the same
            objects to every call. Their number must divide G.
        sink: [s, H] or [T, s, H], as there; None: no sinks.
        options: softmax_scale, softcap, deterministic, backend, out_dtype and return_max_logits, as
            there.

    Returns:
        out: [T, H, E] and AttnForwardMeta with lse [T, H] and max_logits [H] or None.

    Raises:
        ValueError: a number of masks that does not divide the key/value heads.
        TypeError: one mask that is not in a list, or None in a list; and what
            ``flex_flash_attn_func`` raises.

    Cost: one call per group, and a copy of out and of each gradient where there are several.
    """
    check_qkv(q, k, v)
    instance(slices, (list, tuple), "slices", "pass one mask per group of heads in a list")
    for i, mask in enumerate(slices):
        instance(mask, (AttnMask, Tensor), f"slices[{i}]", "pass a mask for each group of heads")
    _check_count(len(slices), k.shape[1])
    heads = zip(*(x.split(x.shape[1] // len(slices), dim=1) for x in (q, k, v)), strict=True)
    sinks = _sinks_of_groups(sink, q, len(slices))
    results = [
        flex_flash_attn_func(*part, slices=mask, sink=of_group, **options)
        for part, mask, of_group in zip(heads, slices, sinks, strict=True)
    ]
    return _joined(results)


def _sinks_of_groups(sink: Tensor | None, q: Tensor, num_groups: int) -> Sequence[Tensor | None]:
    if sink is None:
        return [None] * num_groups
    check_sink(sink, q)
    return sink.split(q.shape[1] // num_groups, dim=-1)


def _joined(results: list[tuple[Tensor, AttnForwardMeta]]) -> tuple[Tensor, AttnForwardMeta]:
    lse = torch.cat([meta.lse for _, meta in results], dim=1)
    logits = [meta.max_logits for _, meta in results if meta.max_logits is not None]
    meta = AttnForwardMeta(lse, torch.cat(logits) if logits else None)
    return torch.cat([out for out, _ in results], dim=1), meta


def _check_count(num_groups: int, heads_kv: int) -> None:
    if num_groups == 0 or heads_kv % num_groups:
        raise ValueError(
            f"the number of masks must divide the {heads_kv} key/value heads, got {num_groups}; "
            f"pass one mask per group of equally many heads"
        )
