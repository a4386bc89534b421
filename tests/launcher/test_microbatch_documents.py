"""Documents of a microbatch on ranks that do not read its samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_magi.launcher.documents import bounds_of_sample
from megatron_magi.launcher.microbatch_documents import UNKNOWN, Microbatch
from tests.launcher.one_rank import launch_of


def test_tensor_parallel_ranks_learn_that_a_sample_has_none() -> None:
    """The first rank tells them; a sample that is not on its host is no error."""
    microbatch = launch_of(96, dataloader_inter_document_masking=True).microbatch
    microbatch.ranks = SimpleNamespace(rank=1, share=lambda lists: [UNKNOWN])  # type: ignore[assignment]
    microbatch.begin(None)
    assert microbatch.bounds() is None
    microbatch.ranks = SimpleNamespace(rank=1, share=lambda lists: [[]])  # type: ignore[assignment]
    microbatch.begin(None)
    with pytest.raises(ValueError, match="require cu_seqlens in every sample"):
        microbatch.bounds()


def test_a_loader_may_fill_the_same_tensor_again() -> None:
    """An external one, of which nothing is drawn ahead."""
    microbatch = Microbatch(lambda sample: bounds_of_sample(sample, eod=0), lambda bounds: None)
    tokens = torch.empty(1, 8, dtype=torch.long)
    for end in (3, 5):
        tokens.fill_(1)[0, end] = 0
        microbatch.begin(None)
        microbatch.see({"tokens": tokens})
        assert microbatch.bounds() == [0, end + 1, 8]


def test_a_sample_that_was_seen_ahead_is_read_once() -> None:
    read: list[int] = []
    microbatch = Microbatch(lambda sample: read.append(1) or [0, 8], lambda bounds: None)
    sample = {"tokens": torch.ones(1, 8, dtype=torch.long)}
    microbatch.see_ahead(sample)
    microbatch.see(sample)
    assert microbatch.bounds() == [0, 8] and read == [1]
