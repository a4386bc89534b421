"""The all-to-all of torch.distributed."""

import pytest
import torch

from megatron_magi.core.comm.transport import AllToAll, RowCounts


def test_one_rank_alone_exchanges_nothing() -> None:
    alone = AllToAll(None)
    assert alone.exchange(torch.zeros(0, 4), torch.zeros(0, 4), RowCounts([0], [0])) is None
    with pytest.raises(AssertionError, match=r"one rank receives nothing, got \[1\]"):
        alone.exchange(torch.zeros(1, 4), torch.zeros(1, 4), RowCounts([1], [1]))
