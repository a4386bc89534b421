"""Boundaries of documents in Bridge's batches, in today's names and those of older data sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_magi.bridge.batch import with_documents
from megatron_magi.launcher.documents import bounds_of_sample


def row(*bounds: int) -> torch.Tensor:
    return torch.tensor([bounds], dtype=torch.int32)


@pytest.mark.parametrize(
    ("sample", "bounds"),
    [
        ({"cu_seqlens_q": row(0, 5, 12, 12)}, [0, 5, 12, 16]),
        ({"cu_seqlens_q": row(0, 5, 12)[0]}, [0, 5, 12, 16]),
        (
            {"cu_seqlens_q": row(0, 5, 8, 8), "cu_seqlens_q_padded": row(0, 8, 12, 16)},
            [0, 5, 8, 11, 12, 16],
        ),
        ({"cu_seqlens": row(0, 5, 16, -1, -1), "cu_seqlens_argmin": torch.tensor(3)}, [0, 5, 16]),
        (
            {"cu_seqlens": row(0, 8, 16, -1), "cu_seqlens_unpadded": row(0, 5, 13, -1)},
            [0, 5, 8, 16],
        ),
        ({}, [0, 16]),
    ],
    ids=["tail", "one row", "padded", "sentinels", "unpadded", "none"],
)
def test_documents_of_a_sample(sample: dict[str, Any], bounds: list[int]) -> None:
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    assert bounds_of_sample(with_documents({"tokens": tokens, **sample}), None) == bounds


def test_several_packed_samples_are_left_for_the_launcher_to_refuse() -> None:
    several = torch.tensor([[0, 5, 16], [0, 9, 16]], dtype=torch.int32)
    assert with_documents({"cu_seqlens_q": several})["cu_seqlens"] is several
