"""Windows, global tokens and type codes hold exactly the cells that the formulas say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import magi_attention as api
from megatron_magi.magi_attention.mask_inference import cu_seqlens_slices
from megatron_magi.magi_attention.mask_type import mask_from_typed, typed_slices
from tests.dense import random_mask
from tests.magi_attention.typed_masks import count_cells, random_typed

WINDOW = st.tuples(st.integers(-1, 14), st.integers(-1, 14))


def limits(window: tuple[int, int], num_keys: int) -> tuple[int, int]:
    """-1, or the number of keys - 1 and more, is no limit."""
    return tuple(10**6 if w == -1 or w >= num_keys - 1 else w for w in window)


def window_cells(sq: int, sk: int, window: tuple[int, int]) -> np.ndarray:
    """The last query on the last key; queries without a key of their own are dropped."""
    left, right = limits(window, sk)
    i, j = np.arange(sq)[:, None], np.arange(sk)[None, :]
    place = i + sk - sq
    return (place >= 0) & (j >= place - left) & (j <= place + right)


def global_cells(n: int, window: tuple[int, int], num_global: int) -> np.ndarray:
    """Self-attention: the window, or one of the first keys up to the window's right side."""
    right = limits(window, n)[1]
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
    return window_cells(n, n, window) | (j < np.minimum(num_global, i + right + 1))


def unequal_global_cells(sq: int, sk: int, window: tuple[int, int], num_global: int) -> np.ndarray:
    """First sample, queries and keys of different number, part by part."""
    right = limits(window, sk)[1]
    split = min(num_global, sk)
    i, j = np.arange(sq)[:, None], np.arange(sk)[None, :]
    cells = j < np.minimum(split, i + right + 1)
    if sk > split:
        cells[:, split:] = window_cells(sq, sk - split, window)
        is_dropped = i < sq - (sk - split)
        if right > 0:
            cells |= is_dropped & (j >= split) & (j <= i + right)
    return cells


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 4), st.integers(0, 4), WINDOW)
@settings(max_examples=300, deadline=None)
def test_window_of_one_document(
    sq: int, sk: int, q_start: int, k_start: int, window: tuple[int, int]
) -> None:
    typed = api.infer_attn_mask_from_sliding_window(
        q_range=api.AttnRange(q_start, q_start + sq),
        k_range=api.AttnRange(k_start, k_start + sk),
        window_size=window,
    )
    assert len(typed[0]) <= 3
    counts = count_cells(typed, 16, 16)
    want = np.zeros((16, 16), dtype=int)
    want[q_start : q_start + sq, k_start : k_start + sk] = window_cells(sq, sk, window)
    assert (counts == want).all()


def test_a_window_is_cut_into_head_middle_and_tail() -> None:
    q, k, kinds = api.infer_attn_mask_from_sliding_window(
        api.AttnRange(5, 15), api.AttnRange(5, 15), (2, 3)
    )
    assert q.to_naive_ranges() == [(5, 7), (7, 11), (11, 15)]
    assert k.to_naive_ranges() == [(5, 10), (5, 14), (9, 15)]
    assert [t.value for t in kinds] == ["causal", "bi_causal", "inv_causal"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), WINDOW, st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_packed_windows_with_global_tokens(
    lengths: list[int], window: tuple[int, int], num_global: int
) -> None:
    cu_seqlens = np.cumsum([0, *lengths])
    if window == (-1, -1):
        window = (-1, 14)
    *typed, total_q, total_k = api.infer_attn_mask_from_cu_seqlens(
        torch.tensor(cu_seqlens), torch.tensor(cu_seqlens), False, window, num_global
    )
    assert total_q == total_k == cu_seqlens[-1]
    want = np.zeros((total_q, total_q), dtype=int)
    for start, length in zip(cu_seqlens, lengths, strict=False):
        block = slice(start, start + length)
        want[block, block] = global_cells(length, window, num_global)
    assert (count_cells(typed, total_q, total_k) == want).all()


@given(st.integers(0, 12), st.integers(1, 12), WINDOW, st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_global_tokens_with_unequal_queries_and_keys(
    sq: int, sk: int, window: tuple[int, int], num_global: int
) -> None:
    if window == (-1, -1):
        window = (-1, 14)
    *typed, _, _ = api.infer_attn_mask_from_cu_seqlens(
        [0, sq], [0, sk], window_size=window, global_window_size=num_global
    )
    want = unequal_global_cells(sq, sk, window, num_global)
    assert (count_cells(typed, sq, sk) == want).all()


@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_are_one_slice_each(causal: bool) -> None:
    q, k, kinds, total_q, total_k = api.infer_attn_mask_from_cu_seqlens(
        cu_seqlens_q=torch.tensor([0, 3, 3, 7], dtype=torch.int32),
        cu_seqlens_k=[0, 5, 6, 8],
        causal=causal,
    )
    assert q.to_naive_ranges() == [(0, 3), (3, 3), (3, 7)]
    assert k.to_naive_ranges() == [(0, 5), (5, 6), (6, 8)]
    assert kinds == [api.AttnMaskType("causal" if causal else "full")] * 3
    assert (total_q, total_k) == (7, 8)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=200, deadline=None)
def test_any_slice_is_at_most_three_typed_ones(seed: int) -> None:
    mask = random_mask(seed, 17, 13)
    typed = typed_slices(mask.slices)
    assert len(typed[0]) <= 3 * mask.num_slices
    assert (count_cells(typed, 17, 13) == mask.to_dense()).all()
    assert mask_from_typed(*typed, 17, 13).to_dense().tolist() == mask.to_dense().tolist()


@given(seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_type_codes_describe_cells_exactly(seed: int) -> None:
    typed = random_typed(seed, 14)
    assert (mask_from_typed(*typed, 14, 14).to_dense() == count_cells(typed, 14, 14)).all()


@pytest.mark.parametrize(
    "arguments, text",
    [
        (([0, 4], [0, 4], True, (2, 0)), "causal must be False with a window, got causal"),
        (([0, 4], [0, 2, 4]), "must name the same documents, got 1 and 2"),
        (([0, 2**31], [0, 4]), "cu_seqlens_q must be .* below 2\\^31"),
    ],
)
def test_refused(arguments: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        api.infer_attn_mask_from_cu_seqlens(*arguments)


def test_batches_become_documents() -> None:
    cu_q, cu_k = api.infer_varlen_mask_from_batch(batch_size=3, seq_len=4)
    assert cu_q.tolist() == cu_k.tolist() == [0, 4, 8, 12] and cu_q.dtype == torch.int32
    x = torch.arange(24).view(3, 4, 2)
    assert torch.equal(api.squash_batch_dim(x), x.view(12, 2))


@pytest.mark.parametrize("total, cp, chunk, pad", [(16, 2, 4, 0), (17, 2, 4, 7), (1, 3, 5, 14)])
def test_pad_size(total: int, cp: int, chunk: int, pad: int) -> None:
    assert api.compute_pad_size(total_seqlen_q=total, cp_size=cp, chunk_size=chunk) == pad


@pytest.mark.parametrize("most", [2**31, 2**63 - 1, 2**100])
def test_windows_longer_than_any_sequence_are_no_limit(most: int) -> None:
    """Sums with the starts of later documents must not wrap around."""
    sums = np.array([0, 6, 16])
    for window in ((most, 0), (0, most)):
        same = tuple(100 if side == most else side for side in window)
        assert cu_seqlens_slices(sums, sums, False, window).tolist() == (
            cu_seqlens_slices(sums, sums, False, same).tolist()
        )
    ours, want = (cu_seqlens_slices(sums, sums, False, (2, 0), n).tolist() for n in (most, 100))
    assert ours == want
