"""Making keys: equal ones from equal inputs, what is deprecated, what is refused."""

from typing import Any

import pytest
import torch

from megatron_magi import magi_attention as api
from tests.magi_attention.one_rank import flex_key, varlen_key


def test_device_tensors_and_host_lists_make_one_key() -> None:
    as_tensor = torch.tensor([0, 5, 16], dtype=torch.int32)
    assert varlen_key(cu_seqlens_q=as_tensor, cu_seqlens_k=as_tensor) == varlen_key()


def test_deprecated_arguments() -> None:
    with pytest.warns(DeprecationWarning, match="pad_size is without effect"):
        assert varlen_key(pad_size=7) == varlen_key()
    with pytest.warns(DeprecationWarning, match="use DispatchConfig"):
        assert flex_key(chunk_size=4).chunk_size == 4
    with pytest.warns(DeprecationWarning, match="use DispatchConfig"):
        assert flex_key(chunk_size=11) == flex_key()  # which would pad on one rank, for nothing
    config = api.DistAttnConfig(dispatch_config=api.DispatchConfig(chunk_size=8))
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(ValueError, match="must be given once, got 4 as an argument and 8 in"),
    ):
        flex_key(chunk_size=4, dist_attn_config=config)
    x = torch.zeros(16, 2)
    with pytest.warns(DeprecationWarning, match="use magi_attn_varlen_key, then dispatch"):
        api.magi_attn_varlen_dispatch(x, [0, 16], [0, 16], 4, 2, 8, 0, None)


def test_homes_of_queries_and_keys_are_what_the_flags_say() -> None:
    permuted = flex_key(is_same_source=False).plan
    assert permuted.cross_layout is not None
    still = flex_key(is_same_source=False, is_q_permutable=False, is_k_permutable=False).plan
    for layout in still.homes:
        assert layout.chunk_ranks.tolist() == list(range(still.cp_size))
    assert flex_key(is_k_permutable=False).plan.cross_layout is None
    longer = varlen_key(cu_seqlens_k=[0, 5, 20])
    assert (longer.total_seqlen_q, longer.total_seqlen_k) == (16, 20)
    later = api.make_varlen_key_for_new_mask_after_dispatch([0, 16], [0, 20], longer)
    assert later.plan.key_layout == longer.plan.key_layout


def test_a_second_mask_of_cross_attention_has_the_same_keys() -> None:
    ranges = [api.AttnRanges.from_ranges([[0, end]]) for end in (16, 20)]
    first = varlen_key(cu_seqlens_k=[0, 5, 20])
    second = api.make_flex_key_for_new_mask_after_dispatch(*ranges, "full", first)
    assert second.plan.mask.area() == 16 * 20
    assert second.plan.key_layout == first.plan.key_layout


def test_one_rank_pads_no_keys_for_chunks() -> None:
    with pytest.warns(DeprecationWarning, match="use DispatchConfig"):
        key = varlen_key(cu_seqlens_k=[0, 5, 18], chunk_size=4)  # 16 queries are four chunks
    assert key.plan.key_layout.num_local_tokens == 18


def test_one_source_has_one_length() -> None:
    with pytest.raises(ValueError, match="got 16 and 18 tokens; pass is_same_source=False"):
        flex_key(total_seqlen_k=18)


@pytest.mark.parametrize(
    "make, text",
    [
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
