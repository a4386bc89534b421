"""RoPE by the positions of the rows that a rank holds.

Stock rotary embeddings assume that a rank holds two mirrored pieces of the sequence (zigzag). Ours
reads the positions from the microbatch's `MagiPackedSeqParams`, so any token layout works, and
every document may start at position 0.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor
from typing_extensions import Self

from megatron_magi.adapter.packed import MagiPackedSeqParams


class RowPositions:
    """A mixin that lets a rotary embedding follow given positions."""

    positions: Tensor | None = None
    """int64 [rows], the position of each local row; None: the stock angles."""

    @classmethod
    def from_stock(cls, stock: Any) -> Self:
        """An embedding with the same frequencies and scaling; `stock` itself if it is ours."""
        if isinstance(stock, cls):
            return stock
        ours = cls.__new__(cls)
        ours.__dict__.update(stock.__dict__)
        return ours

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[rows, 1, 1, dim] angles, with their scale in YaRN; they are not cached, because
        positions change with every microbatch."""
        if self.positions is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        # An angle is the position times a frequency, and the frequency is the angle of position 1.
        stock = super().get_emb(2)  # type: ignore[misc]
        angles, *scale = stock if isinstance(stock, tuple) else (stock,)
        positions = self.positions.to(angles.device, angles.dtype)
        rows = positions[:, None, None, None] * angles[1]
        return (rows, *scale) if scale else rows


class MagiRotaryEmbedding(RowPositions, RotaryEmbedding):  # type: ignore[misc]
    """A `RotaryEmbedding` that follows the `rope_positions` of a `MagiPackedSeqParams`.

    With any other (or no) packed_seq_params it behaves like the stock module.
    """

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Take the microbatch's positions here, because Megatron calls this before `forward`."""
        packed = next(
            (a for a in (*args, *kwargs.values()) if isinstance(a, MagiPackedSeqParams)), None
        )
        self.positions = None if packed is None else packed.rope_positions
        return super().get_rotary_seq_len(*args, **kwargs)
