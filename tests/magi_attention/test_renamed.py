"""Which version's names these are, and what is said of those that are not here."""

from importlib import import_module

import pytest

from megatron_magi import magi_attention as api
from megatron_magi.magi_attention import renamed

V1_1_1 = """
magi_attn_varlen_key magi_attn_varlen_dispatch magi_attn_flex_key magi_attn_flex_dispatch dispatch
undispatch roll roll_simple calc_attn clear_cache get_most_recent_key get_position_ids
make_varlen_key_for_new_mask_after_dispatch make_flex_key_for_new_mask_after_dispatch
flex_flash_attn_func compute_pad_size squash_batch_dim infer_varlen_mask_from_batch
infer_attn_mask_from_sliding_window infer_attn_mask_from_cu_seqlens AttnForwardMeta AttnMaskType
AttnOverlapMode AttnRanges DistAttnRuntimeKey GeneralAttnMaskType DistAttnConfig DispatchConfig
OverlapConfig GrpCollConfig DispatchAlg MinHeapDispatchAlg ToppHeapDispatchAlg
SequentialDispatchAlg SortedSequentialSelectAlg LBDispatchAlg DPDispatchAlg BSDispatchAlg OverlapAlg
UniformOverlapAlg GreedyOverlapAlg DistAttnRuntimeDictManager dist_attn_runtime_dict_mgr
"""
"""Everything that its `magi_attention.api` names."""

V1_0 = """
full_attention_to_varlen_attention from_mask init_hierarchical_mesh infer_attn_mask_from_window_size
"""
"""What `magi_attention.api` named in some v1.0 and names no more."""


def test_every_published_name_is_here_or_says_what_replaced_it() -> None:
    assert api.MAGI_ATTENTION_VERSION == "1.1.1" and "v1.1.1" in (api.__doc__ or "")
    absent = [name for name in V1_1_1.split() if name not in api.__all__]
    assert absent == ["DistAttnRuntimeDictManager", "dist_attn_runtime_dict_mgr"]
    assert {*absent, *V1_0.split()} <= set(renamed.REPLACED)
    assert not set(renamed.REPLACED) & set(api.__all__)


@pytest.mark.parametrize("name", renamed.REPLACED)
def test_an_old_name_says_what_to_use(name: str) -> None:
    words = f"MagiAttention v1.1.1.*got {name!r}; use "
    with pytest.raises(ImportError, match=words):
        getattr(api, name)
    with pytest.raises(ImportError, match=words):  # Python hides an AttributeError's words here
        exec(f"from megatron_magi.magi_attention import {name}")
    named = renamed.REPLACED[name].split(",")[0].split("(")[0].strip()
    if not named.startswith("nothing"):
        module, _, function = named.partition(";")[0].rpartition(".")
        assert hasattr(
            import_module(module or "megatron_magi.magi_attention"), function.split(" ")[0]
        )


def test_an_unknown_name_is_an_ordinary_error() -> None:
    assert not hasattr(api, "magi_attn_fused_key")
    with pytest.raises(AttributeError, match="no attribute 'magi_attn_fused_key'"):
        _ = api.magi_attn_fused_key
