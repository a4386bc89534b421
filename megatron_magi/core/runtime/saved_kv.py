"""The keys and values that a forward received and kept, so that no rank sends them again.

T local tokens, S rows of a stage's key buffer, G key/value heads, D head_dim, E width of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_magi.core.comm.row_buffer import concat_buffer, split_columns
from megatron_magi.core.comm.rows import gather_rows
from megatron_magi.core.kernel.backend import Pair
from megatron_magi.core.runtime.prepared import PreparedStage


@dataclass(frozen=True)
class SavedKV:
    """The keys and values that a backward reads instead of receiving them again."""

    buffers: Sequence[Tensor]
    """The forward's key buffers that received rows, [rows, G * (D + E)] each."""
    k: Tensor
    """[T, G, D]: own keys."""
    v: Tensor
    """[T, G, E]: own values."""

    def of(self, stage: PreparedStage) -> Pair:
        """Keys [S, G, D] and values [S, G, E] of a stage of the backward that receives rows.

        They are views of a kept buffer if it holds the rows of the stage side by side, and copies
        otherwise.
        """
        place, shapes = stage.kept, self._shapes
        assert place is not None and stage.cast is not None
        buffer = self.buffers[place.number]
        if place.index is None:
            return _pair(buffer[place.rows], shapes)
        made = _pair(concat_buffer(self.k, stage.table.num_k, shapes), shapes)
        if stage.num_own:
            gather_rows((self.k, self.v), stage.cast.own_rows(), made, stage.num_own)
        received = [x[stage.num_own :] for x in made]
        gather_rows(split_columns(buffer, shapes), place.index.here(), received)
        return made

    @property
    def _shapes(self) -> list[torch.Size]:
        return [self.k.shape[1:], self.v.shape[1:]]


def _pair(rows: Tensor, shapes: Sequence[torch.Size]) -> Pair:
    keys, values = split_columns(rows, shapes)
    return keys, values
