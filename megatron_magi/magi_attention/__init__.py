"""MagiAttention's published names on top of this engine: switch by changing an import.

    from megatron_magi.magi_attention import magi_attn_varlen_key, dispatch, calc_attn, undispatch

    key = magi_attn_varlen_key(cu_seqlens, cu_seqlens, num_heads_q, num_heads_kv, head_dim,
                               pad_size=0, cp_group_or_mesh=cp_group, causal=True)
    x_local = dispatch(x, key)
    out, meta = calc_attn(q, k, v, key)
    y = undispatch(y_local, key)

Signatures, keyword names, strings and defaults are those of ``magi_attention.api`` as of v1.1.1
(``MAGI_ATTENTION_VERSION``). A name of v1.0 that is gone says what replaced it, and a
``MAGI_ATTENTION_*`` variable that is set gives one warning: none is read. Arguments that
only tune speed there are accepted without effect; what would change results and is not here is
refused with an error. After `install` programs may keep their ``from magi_attention...`` lines.
Thin: everything is a translation onto ``import megatron_magi``.
"""

# ruff: noqa: F403, F405  two modules list their published names themselves

from typing import NoReturn

from megatron_magi.core.kernel.attention import AttnForwardMeta
from megatron_magi.magi_attention.attention_calls import (
    TUNING_ARGUMENTS,
    calc_attn,
    flex_flash_attn_func,
)
from megatron_magi.magi_attention.dist_attn_config import *
from megatron_magi.magi_attention.fa4 import FA4AttnArg as FA4AttnArg
from megatron_magi.magi_attention.fa4 import fa4_bwd as fa4_bwd
from megatron_magi.magi_attention.fa4 import fa4_fwd as fa4_fwd
from megatron_magi.magi_attention.import_hook import install
from megatron_magi.magi_attention.keys import (
    magi_attn_flex_dispatch,
    magi_attn_flex_key,
    magi_attn_varlen_dispatch,
    magi_attn_varlen_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_varlen_key_for_new_mask_after_dispatch,
)
from megatron_magi.magi_attention.mask_inference import *
from megatron_magi.magi_attention.mask_type import AttnMaskType, GeneralAttnMaskType
from megatron_magi.magi_attention.range import AttnRange, RangeError
from megatron_magi.magi_attention.ranges import AttnRanges
from megatron_magi.magi_attention.renamed import replacement
from megatron_magi.magi_attention.runtime_key import (
    DistAttnRuntimeKey,
    clear_cache,
    get_most_recent_key,
)
from megatron_magi.magi_attention.tokens import (
    dispatch,
    get_position_ids,
    roll,
    roll_simple,
    undispatch,
)

MAGI_ATTENTION_VERSION = "1.1.1"
"""The version of MagiAttention whose published names and signatures these are."""

__all__ = [
    "MAGI_ATTENTION_VERSION", "TUNING_ARGUMENTS", "AttnForwardMeta", "AttnMaskType",
    "AttnOverlapMode", "AttnRange", "AttnRanges", "BSDispatchAlg", "BTPDispatchAlg",
    "BatchToppHeapDispatchAlg", "DPDispatchAlg", "DispatchAlg", "DispatchConfig", "DistAttnConfig",
    "DistAttnRuntimeKey", "GeneralAttnMaskType", "GreedyOverlapAlg", "GrpCollConfig",
    "LBDispatchAlg", "MinHeapDispatchAlg", "OverlapAlg", "OverlapConfig",
    "RandomSelectDispatchAlg", "RangeError", "SequentialDispatchAlg", "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg", "UniformOverlapAlg", "apply_padding", "calc_attn", "clear_cache",
    "compute_pad_size", "dispatch", "flex_flash_attn_func", "get_most_recent_key",
    "get_position_ids", "infer_attn_mask_from_cu_seqlens", "infer_attn_mask_from_sliding_window",
    "infer_varlen_mask_from_batch", "install", "magi_attn_flex_dispatch", "magi_attn_flex_key",
    "magi_attn_varlen_dispatch", "magi_attn_varlen_key",
    "make_flex_key_for_new_mask_after_dispatch", "make_varlen_key_for_new_mask_after_dispatch",
    "roll", "roll_simple", "squash_batch_dim", "undispatch",
]  # fmt: skip


def __getattr__(name: str) -> NoReturn:
    raise replacement(name, __name__)
