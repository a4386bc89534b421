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
