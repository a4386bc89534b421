"""Keys and configs on one rank: values, defaults, deprecations, everything that is refused."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from megatron_magi import MagiConfig
from megatron_magi import magi_attention as api
from megatron_magi.core.runtime.plan_cache import cached_plan


def varlen_key(**changes: Any) -> api.DistAttnRuntimeKey:
    arguments = {
        "cu_seqlens_q": [0, 5, 16], "cu_seqlens_k": [0, 5, 16], "num_heads_q": 4,
        "num_heads_kv": 2, "head_dim": 8, "pad_size": 0, "cp_group_or_mesh": None,
    }  # fmt: skip
    return api.magi_attn_varlen_key(**(arguments | changes))


def flex_key(**changes: Any) -> api.DistAttnRuntimeKey:
    ranges = api.AttnRanges.from_ranges([[0, 5], [5, 16]])
    arguments = {
        "q_ranges": ranges, "k_ranges": ranges, "attn_mask_type": "full", "total_seqlen_q": 16,
        "total_seqlen_k": 16, "num_heads_q": 4, "num_heads_kv": 2, "head_dim": 8, "pad_size": 0,
        "cp_group_or_mesh": None,
    }  # fmt: skip
    return api.magi_attn_flex_key(**(arguments | changes))


def test_a_key_is_a_hashable_frozen_value() -> None:
    key, same, other = varlen_key(), flex_key(), varlen_key(causal=True)
    assert key == same and hash(key) == hash(same) and len({key, same, other}) == 2
    with pytest.raises(FrozenInstanceError):
        key.cp_group = None  # type: ignore[misc]
    assert (key.total_seqlen_q, key.total_seqlen_k, key.pad_size, key.cp_rank) == (16, 16, 0, 0)
    assert (key.num_heads_q, key.num_heads_kv, key.head_dim) == (4, 2, 8)
    assert other.q_ranges.to_naive_ranges() == [(0, 5), (5, 16)] == [*map(tuple, other.k_ranges)]
    assert other.attn_mask_type == (api.AttnMaskType.CAUSAL,) * 2


def test_device_tensors_and_host_lists_make_one_key() -> None:
    as_tensor = torch.tensor([0, 5, 16], dtype=torch.int32)
    assert varlen_key(cu_seqlens_q=as_tensor, cu_seqlens_k=as_tensor) == varlen_key()


def test_most_recent_key_and_clear_cache() -> None:
    api.clear_cache()
    with pytest.raises(ValueError, match=r"made with this cp_group.*call magi_attn"):
        api.get_most_recent_key(None)
    first = varlen_key()
    second = varlen_key(causal=True)
    assert api.get_most_recent_key(None) is second
    x = api.dispatch(torch.zeros(16, 2), first)
    assert api.get_most_recent_key(None) is first
    hits = cached_plan.cache_info().hits
    varlen_key()
    assert cached_plan.cache_info().hits == hits + 1
    api.clear_cache()
    with pytest.raises(ValueError):
        api.get_most_recent_key(cp_group=None)
    varlen_key()
    assert cached_plan.cache_info().hits == 0
    assert api.undispatch(x, first).shape == (16, 2), "a key outlives the cache"


def test_config_reaches_the_engine() -> None:
    config = api.DistAttnConfig(
        dispatch_config=api.DispatchConfig(chunk_size=4, alg=api.ToppHeapDispatchAlg(top_p=0.5)),
        overlap_config=api.OverlapConfig(degree=3, min_chunk_size=1),
        grpcoll_config=api.GrpCollConfig(num_sms=8),
        magi_config=MagiConfig(deterministic=True, chunk_size=99),
    )
    key = varlen_key(dist_attn_config=config)
    assert key.plan.config == MagiConfig(chunk_size=4, overlap_degree=3, deterministic=True)
    assert key.chunk_size == 4 and key.dist_attn_config is config
    dynamic = api.OverlapConfig(mode=api.AttnOverlapMode.DYNAMIC, degree=None)
    assert api.DistAttnConfig(overlap_config=dynamic).engine_config().overlap_degree is None
    assert api.DistAttnConfig().engine_config() == MagiConfig(overlap_degree=1)


def test_defaults_of_the_configs() -> None:
    c = api.DistAttnConfig()
    assert c == api.DistAttnConfig() and hash(c) == hash(api.DistAttnConfig())
    assert c.dispatch_config == api.DispatchConfig(None, False, api.MinHeapDispatchAlg())
    assert c.overlap_config == api.OverlapConfig(
        api.AttnOverlapMode.STATIC, 1, 8, 512, 64, api.UniformOverlapAlg(False, None), 1.0, 1.0
    )
    assert c.grpcoll_config == api.GrpCollConfig(24, 8, 256, 16, 128, 2_000_000_000, 0)
    none = api.OverlapConfig(mode=api.AttnOverlapMode.DYNAMIC, degree=0)
    assert none.no_overlap and none.max_num_chunks == 1 and not none.enable
    assert none.mode is api.AttnOverlapMode.STATIC
    assert api.SortedSequentialSelectAlg().allocation_ratio == 1.0


def test_deprecated_arguments() -> None:
    with pytest.warns(DeprecationWarning, match="pad_size is without effect"):
        assert varlen_key(pad_size=7) == varlen_key()
    with pytest.warns(DeprecationWarning, match="use DispatchConfig"):
        assert flex_key(chunk_size=4).chunk_size == 4
    config = api.DistAttnConfig(dispatch_config=api.DispatchConfig(chunk_size=8))
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(ValueError, match="must be given once, got 4 as an argument and 8 in"),
    ):
        flex_key(chunk_size=4, dist_attn_config=config)
    x = torch.zeros(16, 2)
    with pytest.warns(DeprecationWarning, match="use magi_attn_varlen_key, then dispatch"):
        api.magi_attn_varlen_dispatch(x, [0, 16], [0, 16], 4, 2, 8, 0, None)


@pytest.mark.parametrize("name", ["is_same_source", "is_q_permutable", "is_k_permutable"])
def test_cross_attention_flags_are_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"got {name}=False; for cross-attention call"):
        flex_key(**{name: False})


def test_cross_attention_lengths_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="must be one sequence, got 16 and 20 tokens"):
        varlen_key(cu_seqlens_k=[0, 5, 20])
    with pytest.raises(NotImplementedError, match="got 16 and 18 tokens; cross-attention"):
        flex_key(total_seqlen_k=18)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: api.DispatchConfig(uneven_shard=True), r"got DispatchConfig\(uneven_shard=True\)"),
        (lambda: api.OverlapConfig(alg=api.GreedyOverlapAlg()), "got GreedyOverlapAlg, which no"),
    ],
)
def test_configs_refused_with_meaning(make: Any, text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        make()


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: api.DispatchConfig(chunk_size=0), "chunk_size must be >= 1 or None, got 0"),
        (lambda: api.OverlapConfig(degree=None), "mode STATIC and none with mode DYNAMIC, got"),
        (lambda: api.OverlapConfig(degree=65), "between 0 and max_num_chunks 64, got 65"),
        (lambda: api.OverlapConfig(degree=-1), "got -1; use 0 to 4"),
        (lambda: api.OverlapConfig(min_chunk_size=0), "min_chunk_size must be > 0, got 0"),
        (lambda: api.OverlapConfig(comm_cost_factor=0.0), "comm_cost_factor must be > 0"),
        (lambda: varlen_key(num_heads_kv=3), "num_heads_q must be a multiple of num_heads_kv"),
        (lambda: flex_key(total_seqlen_q=12, total_seqlen_k=12), "total_seqlen_q = 12"),
        (lambda: flex_key(attn_mask_type=["full"]), r"one per range \(2\), got 1"),
        (lambda: flex_key(k_ranges=api.AttnRanges.from_ranges([[0, 5]])), "must pair up, got 2"),
        (
            lambda: flex_key(q_ranges=api.AttnRanges.from_ranges([[0, 9], [5, 16]]),
                             k_ranges=api.AttnRanges.from_ranges([[0, 9], [5, 16]])),
            "slices must not share a cell",
        ),
        (
            lambda: api.make_varlen_key_for_new_mask_after_dispatch(
                [0, 12], [0, 12], key_for_dispatch=varlen_key()),
            "a second mask needs a token layout with total_seqlen = 12, got 16",
        ),
    ],
)  # fmt: skip
def test_wrong_values(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_calc_attn_refuses_softcap() -> None:
    key = varlen_key()
    q = torch.zeros(16, 4, 8)
    with pytest.raises(NotImplementedError, match=r"softcap must be 0.0, got 30.0; "):
        api.calc_attn(q, q[:, :2], q[:, :2], key, softcap=30.0)


def test_calc_attn_refuses_a_sink_per_token() -> None:
    q = torch.zeros(16, 4, 8)
    with pytest.raises(ValueError, match=r"a sink of layout 'sh' must be \[s, H\]"):
        api.calc_attn(q, q[:, :2], q[:, :2], varlen_key(), sink=torch.zeros(16, 1, 4))


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
