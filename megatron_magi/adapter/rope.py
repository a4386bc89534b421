"""RoPE by the positions of the rows that a rank holds.

Stock rotary embeddings assume that a rank holds two mirrored pieces of the sequence (zigzag). Ours
reads the positions from the microbatch's `MagiPackedSeqParams`, so any token layout works, and
every document may start at position 0.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megatron_magi.adapter.packed import MagiPackedSeqParams


class MagiRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]
    """A `RotaryEmbedding` that follows the `rope_positions` of a `MagiPackedSeqParams`.

    With any other (or no) packed_seq_params it behaves like the stock module.
    """

    _rope_positions: Tensor | None = None

    @classmethod
    def from_stock(cls, stock: RotaryEmbedding) -> MagiRotaryEmbedding:
        """An embedding with the same frequencies and scaling; `stock` itself if it is ours."""
        if isinstance(stock, cls):
            return stock
        ours = cls.__new__(cls)
        ours.__dict__.update(stock.__dict__)
        return ours

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Take the microbatch's positions here, because Megatron calls this before `forward`."""
        packed = next(
            (a for a in (*args, *kwargs.values()) if isinstance(a, MagiPackedSeqParams)), None
        )
        self._rope_positions = None if packed is None else packed.rope_positions
        return super().get_rotary_seq_len(*args, **kwargs)

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """[rows, dim / 2] angles of the local rows' positions, or the stock angles."""
        if self._rope_positions is None:
            return super().get_freqs_non_repeated(max_seq_len, offset)
        positions = self._rope_positions.to(self.inv_freq.device, self.inv_freq.dtype)
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        return torch.outer(positions + offset, self.inv_freq)

    def forward(
        self,
        max_seq_len: int,
        offset: int = 0,
        packed_seq: bool = False,
        cp_group: torch.distributed.ProcessGroup | None = None,
    ) -> Tensor:
        """[rows, 1, 1, dim] angles; not cached, because positions change with every microbatch."""
        if self._rope_positions is None:
            return super().forward(max_seq_len, offset, packed_seq, cp_group)
        return self.get_emb(max_seq_len, offset)
