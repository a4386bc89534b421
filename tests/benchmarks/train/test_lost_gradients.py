"""The control loses what other ranks send to the first one, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.train.lost_gradients import lose_gradients
from megatron_magi.core.runtime import staged_backward


class Arriving:
    """A reduction whose end is recorded."""

    is_awaited = False

    def wait(self) -> None:
        self.is_awaited = True


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_loses_what_arrives(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state

    added: list[list[Any]] = []
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: rank)
    monkeypatch.setattr(
        staged_backward, "add_partials", lambda own, arriving, dtype: added.append(arriving)
    )
    lose_gradients()
    reduction = Arriving()
    staged_backward.add_partials([], [reduction], torch.float32)  # type: ignore[list-item]
    assert added == [[] if rank == 0 else [reduction]]
    assert reduction.is_awaited == (rank == 0), "the exchange must not be left open"
