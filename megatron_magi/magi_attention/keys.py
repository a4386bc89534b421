"""Keys from masks, and a second mask on the tokens of an earlier key."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor
from typing_extensions import deprecated

from megatron_magi.checks import flag, integer, optional_integer
from megatron_magi.config import MagiConfig
from megatron_magi.core.comm.process_group import CpGroup, group_size
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.plan import HeadShape, TokenLayout, contiguous_layout
from megatron_magi.core.runtime.plan_cache import plan_for, with_nodes_of
from megatron_magi.magi_attention.dist_attn_config import DistAttnConfig
from megatron_magi.magi_attention.mask_inference import (
    CuSeqlens,
    cu_seqlens_slices,
    host_cu_seqlens,
)
from megatron_magi.magi_attention.mask_type import GeneralAttnMaskType, mask_from_typed
from megatron_magi.magi_attention.ranges import AttnRanges
from megatron_magi.magi_attention.renamed import tell_about_environment
from megatron_magi.magi_attention.runtime_key import (
    DistAttnRuntimeKey,
    check_config,
    check_key,
    flat_group,
    remember,
)
from megatron_magi.magi_attention.tokens import dispatch

_DEFAULT = DistAttnConfig()


def magi_attn_varlen_key(
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: CpGroup,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig = _DEFAULT,
    chunk_size: int | None = None,
) -> DistAttnRuntimeKey:
    """Plan packed documents on a group; every rank calls it with the same arguments.

    Args:
        cu_seqlens_q, cu_seqlens_k: [num_docs + 1] prefix sums with one common end, on the host or
            (one copy) the device.
        num_heads_q, num_heads_kv, head_dim: of one tensor-parallel rank.
        pad_size: deprecated, without effect: any length is padded inside. Pass 0.
        cp_group_or_mesh: a group, a mesh, or None for one rank without torch.distributed.
        causal, window_size: as ``infer_attn_mask_from_cu_seqlens``.
        chunk_size: deprecated, use ``DispatchConfig(chunk_size=...)``. On one rank it is left out
            where it would add padding.

    Raises:
        ValueError: a mask, head counts or chunk size that do not fit.

    Cost: no communication; plans are cached by content.
    """
    tell_about_environment()
    mask = _varlen_mask(cu_seqlens_q, cu_seqlens_k, causal, window_size)
    heads = HeadShape(num_heads_q, num_heads_kv, head_dim)
    return _key(mask, heads, pad_size, cp_group_or_mesh, dist_attn_config, chunk_size)


def magi_attn_flex_key(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: CpGroup,
    dist_attn_config: DistAttnConfig = _DEFAULT,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    chunk_size: int | None = None,
) -> DistAttnRuntimeKey:
    """Plan any mask written as ranges and types; every rank calls it with the same arguments.

    Args:
        q_ranges, k_ranges: row i of both is slice i; slices must not share a cell.
        attn_mask_type: "full", "causal", "inv_causal", "bi_causal" or the enum, one for all or one
            per slice.
        is_same_source: False: cross-attention, whose keys are dispatched with ``side="keys"``, also
            where there are as many keys as queries.
        is_q_permutable, is_k_permutable: False: every rank owns one piece of the sequence, in
            order. In self-attention both are the same tokens, and one False suffices.
        others: as ``magi_attn_varlen_key``.

    Raises:
        ValueError: a mask, head counts or chunk size that do not fit; queries and keys of one
            source with different lengths.
    """
    tell_about_environment()
    homes = _Homes(
        flag(is_same_source, "is_same_source"),
        not flag(is_q_permutable, "is_q_permutable"),
        not flag(is_k_permutable, "is_k_permutable"),
    )
    mask = mask_from_typed(q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k)
    heads = HeadShape(num_heads_q, num_heads_kv, head_dim)
    return _key(mask, heads, pad_size, cp_group_or_mesh, dist_attn_config, chunk_size, homes)


@deprecated("magi_attn_varlen_dispatch: use magi_attn_varlen_key, then dispatch")
def magi_attn_varlen_dispatch(
    x: Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: CpGroup,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig = _DEFAULT,
    chunk_size: int | None = None,
) -> tuple[Tensor, DistAttnRuntimeKey]:
    """``magi_attn_varlen_key`` and ``dispatch`` in one: (local x, key)."""
    key = magi_attn_varlen_key(
        cu_seqlens_q, cu_seqlens_k, num_heads_q, num_heads_kv, head_dim, pad_size,
        cp_group_or_mesh, causal, window_size, dist_attn_config, chunk_size,
    )  # fmt: skip
    return dispatch(x, key), key


@deprecated("magi_attn_flex_dispatch: use magi_attn_flex_key, then dispatch")
def magi_attn_flex_dispatch(
    x: Tensor,
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: CpGroup,
    dist_attn_config: DistAttnConfig = _DEFAULT,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    chunk_size: int | None = None,
) -> tuple[Tensor, DistAttnRuntimeKey]:
    """``magi_attn_flex_key`` and ``dispatch`` in one: (local x, key)."""
    key = magi_attn_flex_key(
        q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k, num_heads_q,
        num_heads_kv, head_dim, pad_size, cp_group_or_mesh, dist_attn_config, is_same_source,
        is_q_permutable, is_k_permutable, chunk_size,
    )  # fmt: skip
    return dispatch(x, key), key


def make_varlen_key_for_new_mask_after_dispatch(
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    key_for_dispatch: DistAttnRuntimeKey,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig | None = None,
) -> DistAttnRuntimeKey:
    """A second mask over tokens that ``key_for_dispatch`` laid out (hybrid window + full models).

    The layout stays, so its balance is that of the first mask. See
    ``make_flex_key_for_new_mask_after_dispatch``.
    """
    tell_about_environment()
    check_key(key_for_dispatch, "key_for_dispatch")
    mask = _varlen_mask(cu_seqlens_q, cu_seqlens_k, causal, window_size)
    return _second_key(mask, key_for_dispatch, key_for_dispatch.plan.head_shape, dist_attn_config)


def make_flex_key_for_new_mask_after_dispatch(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    key_for_dispatch: DistAttnRuntimeKey,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    dist_attn_config: DistAttnConfig | None = None,
) -> DistAttnRuntimeKey:
    """A second mask over tokens that ``key_for_dispatch`` laid out.

    Args:
        num_heads_q, num_heads_kv, head_dim: None: those of ``key_for_dispatch``.
        dist_attn_config: its overlap part is used; None: that of ``key_for_dispatch``.

    Raises:
        ValueError: a mask of another length than the dispatched sequence.
    """
    tell_about_environment()
    check_key(key_for_dispatch, "key_for_dispatch")
    first = key_for_dispatch
    old = first.plan.head_shape
    heads = HeadShape(
        old.num_heads_q if num_heads_q is None else num_heads_q,
        old.num_heads_kv if num_heads_kv is None else num_heads_kv,
        old.head_dim if head_dim is None else head_dim,
    )
    mask = mask_from_typed(
        q_ranges, k_ranges, attn_mask_type, first.total_seqlen_q, first.total_seqlen_k
    )
    return _second_key(mask, first, heads, dist_attn_config)


class _Homes(NamedTuple):
    """Where queries and keys may lie."""

    same_source: bool = True
    contiguous_q: bool = False
    contiguous_k: bool = False

    def layouts(
        self, mask: AttnMask, cp_size: int, config: MagiConfig
    ) -> tuple[TokenLayout | None, TokenLayout | None]:
        """The layouts of queries and keys that ``plan`` is given; None: it chooses."""
        lengths = mask.total_seqlen_q, mask.total_seqlen_k
        q, k = (contiguous_layout(length, cp_size, config) for length in lengths)
        if self.same_source:
            return q if self.contiguous_q or self.contiguous_k else None, None
        same = lengths[0] == lengths[1]  # then a plan has one layout unless it is given two
        return q if self.contiguous_q else None, k if self.contiguous_k or same else None


def _key(
    mask: AttnMask,
    heads: HeadShape,
    pad_size: int,
    cp_group_or_mesh: CpGroup,
    config: DistAttnConfig,
    chunk_size: int | None,
    homes: _Homes | None = None,
) -> DistAttnRuntimeKey:
    check_config(config)
    chunk_size = optional_integer(chunk_size, "chunk_size", 1)
    if integer(pad_size, "pad_size", 0):
        warnings.warn(
            "pad_size is without effect: any length is padded inside; pass 0",
            DeprecationWarning,
            stacklevel=3,
        )
    homes = homes or _Homes(mask.total_seqlen_q == mask.total_seqlen_k)
    if homes.same_source and mask.total_seqlen_q != mask.total_seqlen_k:
        raise ValueError(
            f"queries and keys of one source must be one sequence, got {mask.total_seqlen_q} and "
            f"{mask.total_seqlen_k} tokens; pass is_same_source=False for cross-attention"
        )
    group = flat_group(cp_group_or_mesh)
    moved = _with_chunk_size(config, chunk_size)
    lengths = mask.total_seqlen_q, mask.total_seqlen_k
    if chunk_size is None or group_size(group) > 1 or not any(n % chunk_size for n in lengths):
        config = moved  # one rank needs no chunks, and callers pass it rows without padding
    engine = with_nodes_of(cp_group_or_mesh, config.magi_config)
    if engine is not config.magi_config:
        config = replace(config, magi_config=engine)
    engine = config.engine_config()
    layout, key_layout = homes.layouts(mask, group_size(group), engine)
    plan = plan_for(mask, group, heads, engine, layout=layout, key_layout=key_layout)
    return remember(DistAttnRuntimeKey(plan, group, config))


def _second_key(
    mask: AttnMask, first: DistAttnRuntimeKey, heads: HeadShape, config: DistAttnConfig | None
) -> DistAttnRuntimeKey:
    if config is not None:
        check_config(config)
    merged = replace(
        first.dist_attn_config,
        overlap_config=(config or first.dist_attn_config).overlap_config,
    )
    plan = plan_for(
        mask, first.cp_group, heads, merged.engine_config(), layout=first.plan.layout,
        key_layout=first.plan.cross_layout,
    )  # fmt: skip
    return remember(DistAttnRuntimeKey(plan, first.cp_group, merged))


def _varlen_mask(
    cu_seqlens_q: CuSeqlens, cu_seqlens_k: CuSeqlens, causal: bool, window_size: tuple[int, int]
) -> AttnMask:
    q, k = host_cu_seqlens(cu_seqlens_q, cu_seqlens_k)
    slices = cu_seqlens_slices(q, k, causal, window_size)
    return AttnMask(slices, int(q[-1]), int(k[-1]))


def _with_chunk_size(config: DistAttnConfig, chunk_size: int | None) -> DistAttnConfig:
    """The config with the deprecated argument moved to where it belongs."""
    if chunk_size is None:
        return config
    warnings.warn(
        "the chunk_size argument is deprecated; use DispatchConfig(chunk_size=...)",
        DeprecationWarning,
        stacklevel=4,
    )
    given = config.dispatch_config.chunk_size
    if given not in (None, chunk_size):
        raise ValueError(
            f"chunk_size must be given once, got {chunk_size} as an argument and {given} in "
            f"DispatchConfig; drop the argument"
        )
    return replace(config, dispatch_config=replace(config.dispatch_config, chunk_size=chunk_size))
