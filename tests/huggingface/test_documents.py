"""Documents by positions, prefix sums and padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_magi.huggingface import find_documents
from tests.huggingface.tiny_models import positions


def test_a_sequence_is_one_document() -> None:
    found = find_documents((2, 5))
    assert found.cu_seqlens.tolist() == [0, 5, 10] and not found.is_padding.any()


def test_positions_that_restart_or_jump_begin_documents() -> None:
    rows = torch.tensor([[0, 1, 0, 1, 2], [3, 4, 5, 9, 10]])
    assert find_documents((2, 5), rows).cu_seqlens.tolist() == [0, 2, 5, 8, 10]


def test_positions_of_one_row_hold_for_all() -> None:
    assert find_documents((2, 5), positions(2, 3)).cu_seqlens.tolist() == [0, 2, 5, 7, 10]


def test_empty_documents_of_prefix_sums_are_left_out() -> None:
    sums = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    assert find_documents((1, 6), positions(6), sums).cu_seqlens.tolist() == [0, 2, 6]


@pytest.mark.parametrize("window", [None, 2])
def test_padding_sees_nothing_and_is_not_seen(window: int | None) -> None:
    keep = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    dense = find_documents((2, 5), positions(5), padding=keep).mask(window).to_dense()
    tokens = keep.reshape(-1).numpy().astype(bool)
    row = np.repeat([0, 1], 5)
    distance = np.arange(10)[:, None] - np.arange(10)[None]
    expected = (row[:, None] == row) & tokens[:, None] & tokens & (distance >= 0)
    expected &= distance < (window or 10)
    assert np.array_equal(dense, expected)


def test_a_sequence_of_padding_alone() -> None:
    assert find_documents((1, 4), padding=torch.zeros(1, 4, dtype=torch.bool)).mask().area() == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"position_ids": torch.zeros(3, 1, 5).int()},
            r"position_ids must be \[1, 5\].*\[3, 1, 5\]",
        ),
        ({"cu_seqlens": torch.tensor([1, 5])}, "from 0 to the 5 rows"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 5])}, "must ascend"),
        ({"padding": torch.tensor([[1, 0, 1, 1, 1]])}, "between tokens in sequence 0"),
        ({"padding": torch.ones(1, 4).int()}, "attention_mask must be"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_documents((1, 5), **arguments)


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        ({"padding": torch.tensor([[0.0, 0.0, 0.0, -1e9, -1e9]])}, TypeError, "not added to"),
        ({"padding": torch.tensor([[1, 1, 2, 2, 0]])}, ValueError, "got up to 2; name documents"),
        ({"position_ids": torch.arange(5)[None] * 0.5}, TypeError, "must have integers"),
        ({"cu_seqlens": torch.tensor([0, 3.7, 5])}, TypeError, "must have integers"),
        ({"cu_seqlens": torch.tensor([[0, 2], [2, 5]])}, ValueError, r"shape \[2, 2\]"),
        ({"cu_seqlens": [0, 5]}, TypeError, "cu_seq_lens_q"),
        ({"batch_shape": None}, TypeError, "batch_shape must hold integers"),
        ({"batch_shape": (1, 5, 2)}, ValueError, r"got \[1, 5, 2\]; pass input_ids.shape"),
    ],
)
def test_numbers_that_mean_something_else_are_refused(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        find_documents(**{"batch_shape": (1, 5), **arguments})


def test_a_window_has_a_key() -> None:
    """One of 0 keys would mean no window to the mask's builder."""
    with pytest.raises(ValueError, match="window must be at least 1"):
        find_documents((1, 5)).mask(0)
