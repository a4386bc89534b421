"""Boundaries of documents, from what Megatron's batches say of them."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.launcher.documents import (
    MaskRequest,
    bounds_of_cu_seqlens,
    bounds_of_eod,
    bounds_of_sample,
    requested_mask,
    sequence_bounds,
)
from megatron_magi.masks import causal, from_cu_seqlens

EOD = 127
Layout = tuple[list[int], list[int], int, int]
"""(lengths of documents, their padding, tokens behind the last one, copies of the last entry)."""


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bounds(cu_seqlens: list[int], total: int, padded: list[int] | None = None) -> list[int]:
    slots = None if padded is None else int32(padded)
    return bounds_of_cu_seqlens(int32(cu_seqlens), slots, total)


@pytest.mark.parametrize(
    ("cu_seqlens", "padded", "said"),
    [
        pytest.param([0, 4, 8, 0, 0], None, r"cu_seqlens must begin .*\[8, 0, 0\]", id="zeros"),
        pytest.param([0, 4, 8, -1, -1], None, r"not 0 or -1", id="sentinels"),
        pytest.param([0, 6, 3, 8], None, "never descend", id="descending"),
        pytest.param([2, 4, 8], None, "begin with 0", id="not from 0"),
        pytest.param([], None, "begin with 0", id="none"),
        pytest.param([0, 4, 10], None, "within the 8 tokens", id="beyond the stream"),
        pytest.param([0, 4, 8], [0, 6, 10], "cu_seqlens_padded must .* 8 tokens", id="its padding"),
        pytest.param([0, 3, 5], [0, 8], "room for .* document 1 of", id="too few slots"),
        pytest.param([0, 5, 7], [0, 4, 8], "room for .* document 0 of", id="a slot too small"),
    ],
)
def test_boundaries_are_prefix_sums(
    cu_seqlens: list[int], padded: list[int] | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        bounds(cu_seqlens, 8, padded)


def test_packed_samples_come_as_one_stream() -> None:
    with pytest.raises(ValueError, match=r"one stream, got .* \(2, 3\); set --micro-batch-size 1"):
        bounds_of_cu_seqlens(torch.zeros(2, 3, dtype=torch.int32), None, 8)


def test_equal_sequences() -> None:
    assert sequence_bounds((3, 4)) == [0, 4, 8, 12]
    assert sequence_bounds((1, 4)) == [0, 4]


def test_documents_of_joined_samples() -> None:
    tokens = torch.tensor([[1, 2, EOD, 3], [4, EOD, 5, 6]])
    cu_seqlens = int32([[0, 3, 4, 4], [0, 2, 4, 4]])  # type: ignore[list-item]
    sample = {"tokens": tokens, "cu_seqlens": cu_seqlens}
    assert bounds_of_sample(sample, EOD) == [0, 3, 4, 6, 8]
    assert bounds_of_sample({"tokens": tokens}, EOD) == [0, 3, 4, 6, 8]
    assert bounds_of_sample({"tokens": tokens}, None) == [0, 4, 8]
    assert bounds_of_sample({**sample, "cu_seqlens_padded": cu_seqlens}, EOD) == [0, 3, 4, 6, 8]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    lengths[0] += 1  # a stream has a token
    size = len(lengths)
    padding = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    return lengths, padding, draw(st.integers(0, 5)), draw(st.integers(0, 4))


def assert_boundaries(got: list[int], true: set[int], total: int) -> None:
    assert got[0] == 0 and got[-1] == total
    assert all(start < end for start, end in pairwise(got))
    assert set(got) == true | {0, total}


@given(layouts())
def test_boundaries_are_those_of_the_documents(layout: Layout) -> None:
    lengths, _, tail, copies = layout
    cu_seqlens = [0, *accumulate(lengths)]
    total = cu_seqlens[-1] + tail
    got = bounds([*cu_seqlens, *cu_seqlens[-1:] * copies], total)
    assert_boundaries(got, set(cu_seqlens), total)
    assert bounds_of_cu_seqlens(int32([cu_seqlens]), None, total) == got  # type: ignore[list-item]


@given(layouts(), layouts())
def test_samples_of_a_batch_are_joined(first: Layout, second: Layout) -> None:
    wanted, rows, total = {0}, [], 64
    for i, (lengths, *_) in enumerate((first, second)):
        cu_seqlens = [0, *accumulate(lengths)]
        rows.append(cu_seqlens + [total] * (total - len(cu_seqlens)))
        wanted |= {i * total + bound for bound in (*cu_seqlens, total)}
    sample = {"tokens": torch.ones(2, total), "cu_seqlens": torch.tensor(rows)}
    assert_boundaries(bounds_of_sample(sample, None), wanted, 2 * total)


@given(layouts())
def test_boundaries_are_those_of_padded_documents(layout: Layout) -> None:
    lengths, padding, tail, copies = layout
    slots = [0, *accumulate(map(sum, zip(lengths, padding, strict=True)))]
    ends = {slot + length for slot, length in zip(slots, lengths, strict=False)}
    cu_seqlens = [0, *accumulate(lengths)]
    total = slots[-1] + tail
    copied = [[*each, *each[-1:] * copies] for each in (cu_seqlens, slots)]
    assert_boundaries(bounds(copied[0], total, copied[1]), {*slots, *ends}, total)


@given(st.integers(1, 3), st.integers(1, 12), st.data())
def test_boundaries_are_behind_every_end_of_document(
    batch: int, length: int, data: st.DataObject
) -> None:
    size = batch * length
    tokens = data.draw(st.lists(st.sampled_from([1, EOD]), min_size=size, max_size=size))
    got = bounds_of_eod(torch.tensor(tokens).reshape(batch, length), EOD)
    ends = {place + 1 for place, token in enumerate(tokens) if token == EOD}
    assert_boundaries(got, ends | set(range(0, size, length)), size)


def test_a_mask_function_sees_boundaries_and_rows() -> None:
    batch = {"tokens": torch.ones(1, 8)}
    seen: list[MaskRequest] = []

    def masked(request: MaskRequest) -> object:
        seen.append(request)
        return from_cu_seqlens(request.bounds)

    assert requested_mask(masked, [0, 3, 8], batch) == from_cu_seqlens([0, 3, 8])
    assert seen[0].bounds == (0, 3, 8) and seen[0].total_seqlen == 8 and seen[0].batch is batch
    assert requested_mask(None, [0, 3, 8], batch) is None
    both = requested_mask(lambda request: (masked(request), causal(8)), [0, 3, 8], None)
    assert both == (from_cu_seqlens([0, 3, 8]), causal(8))


def test_a_mask_function_gives_a_mask() -> None:
    with pytest.raises(TypeError, match="must return an AttnMask, got list; build one with"):
        requested_mask(lambda request: [request.bounds], [0, 8], None)
