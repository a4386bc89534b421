"""Parameter names, order and defaults are the published ones: an import is all to change."""

import inspect

import pytest

from megatron_magi import magi_attention as api

_KEY = "num_heads_q, num_heads_kv, head_dim, pad_size, cp_group_or_mesh"
_FLAGS = "is_same_source=True, is_q_permutable=True, is_k_permutable=True, chunk_size=None"
_VARLEN = f"cu_seqlens_q, cu_seqlens_k, {_KEY}, causal=False, window_size=(-1, -1)"
_FLEX = f"q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k, {_KEY}"

PUBLISHED = {
    "flex_flash_attn_func": "q, k, v, q_ranges=None, k_ranges=None, attn_type_map=None, *, "
    "index_attn_indices=None, q_block_size=1, k_block_size=1, sink=None, sink_layout='sh', "
    "softmax_scale=None, softcap=0.0, deterministic=False, sm_margin=0, "
    "disable_fwd_atomic_reduction=False, disable_bwd_dkv_atomic_reduction=False, "
    "ref_block_size=None, max_seqlen_q=None, auto_range_merge=False, swap_ab=False, "
    "pack_gqa=False, cat_gqa=False, sparse_load=False, index_attn=False, "
    "swap_bwd_qk_loop=False, return_max_logits=False",
    "magi_attn_varlen_key": f"{_VARLEN}, dist_attn_config=CONFIG, chunk_size=None",
    "magi_attn_flex_key": f"{_FLEX}, dist_attn_config=CONFIG, {_FLAGS}",
    "magi_attn_varlen_dispatch": f"x, {_VARLEN}, dist_attn_config=CONFIG, chunk_size=None",
    "magi_attn_flex_dispatch": f"x, {_FLEX}, dist_attn_config=CONFIG, {_FLAGS}",
    "dispatch": "x, key, pad_value=0.0, *, side='queries'",  # side is this package's own
    "undispatch": "x, key, is_partial_grad=False, *, side='queries'",
    "calc_attn": "q, k, v, key, sink=None, softmax_scale=None, softcap=0.0, "
    "return_max_logits=False",
    "roll": "x, shift, dim, key",
    "roll_simple": "x, shift, dim, key",
    "get_position_ids": "key, *, side='queries'",
    "get_most_recent_key": "cp_group",
    "clear_cache": "cp_group=None",
    "make_varlen_key_for_new_mask_after_dispatch": "cu_seqlens_q, cu_seqlens_k, key_for_dispatch, "
    "causal=False, window_size=(-1, -1), dist_attn_config=None",
    "make_flex_key_for_new_mask_after_dispatch": "q_ranges, k_ranges, attn_mask_type, "
    "key_for_dispatch, num_heads_q=None, num_heads_kv=None, head_dim=None, dist_attn_config=None",
    "compute_pad_size": "total_seqlen_q, cp_size, chunk_size",
    "squash_batch_dim": "x",
    "infer_attn_mask_from_sliding_window": "q_range, k_range, window_size",
    "infer_attn_mask_from_cu_seqlens": "cu_seqlens_q, cu_seqlens_k, causal=False, "
    "window_size=(-1, -1), global_window_size=0",
    "DispatchConfig": "chunk_size=None, uneven_shard=False, alg=FACTORY",
    "OverlapConfig": "mode=STATIC, degree=1, dynamic_max_degree=8, min_chunk_size=512, "
    "max_num_chunks=64, alg=FACTORY, calc_cost_factor=1.0, comm_cost_factor=1.0",
}


def written(function: object) -> str:
    """The parameters as a signature is written, without annotations."""
    parts = []
    for p in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if p.kind is p.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = repr(p.default)
        if isinstance(p.default, api.DistAttnConfig):
            default = "CONFIG"
        elif isinstance(p.default, api.AttnOverlapMode):
            default = p.default.name
        elif "factory" in default:
            default = "FACTORY"
        parts.append(p.name if p.default is p.empty else f"{p.name}={default}")
    return ", ".join(parts)


@pytest.mark.parametrize("name", PUBLISHED)
def test_signature(name: str) -> None:
    assert written(getattr(api, name)) == PUBLISHED[name]


def test_every_published_name_is_there() -> None:
    names = """flex_flash_attn_func magi_attn_varlen_key magi_attn_flex_key
    magi_attn_varlen_dispatch magi_attn_flex_dispatch dispatch undispatch calc_attn
    get_position_ids get_most_recent_key roll roll_simple
    make_varlen_key_for_new_mask_after_dispatch make_flex_key_for_new_mask_after_dispatch
    infer_attn_mask_from_cu_seqlens infer_attn_mask_from_sliding_window
    infer_varlen_mask_from_batch squash_batch_dim compute_pad_size clear_cache AttnRange
    AttnRanges AttnMaskType AttnForwardMeta DistAttnConfig DispatchConfig OverlapConfig
    GrpCollConfig DistAttnRuntimeKey AttnOverlapMode GeneralAttnMaskType DispatchAlg
    MinHeapDispatchAlg ToppHeapDispatchAlg SequentialDispatchAlg SortedSequentialSelectAlg
    LBDispatchAlg DPDispatchAlg BSDispatchAlg OverlapAlg UniformOverlapAlg GreedyOverlapAlg"""
    assert set(names.split()) <= set(api.__all__)
    assert all(hasattr(api, name) for name in api.__all__)
