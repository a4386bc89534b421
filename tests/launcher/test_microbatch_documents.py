"""Documents of a microbatch on ranks that do not read its samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_magi.launcher.microbatch_documents import UNKNOWN
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
