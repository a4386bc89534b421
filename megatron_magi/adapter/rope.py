"""RoPE by the positions of the rows that a rank holds.

Stock rotary embeddings assume that a rank holds two mirrored pieces of the sequence (zigzag). Ours
reads the positions from the microbatch's `MagiPackedSeqParams`, so any token layout works, and
every document may start at position 0.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor

from megatron_magi.adapter.packed import MagiPackedSeqParams


class RowPositions:
    """A mixin that lets a rotary embedding follow given positions."""

    positions: Tensor | None = None
    """int64 [rows], the position of each local row; None: the stock angles."""

    @classmethod
    def from_stock(cls, stock: Any) -> Self:
        """An embedding with the same frequencies and scaling."""
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


class YarnRowPositions(RowPositions):
    """The same for YaRN, whose fused kernel reads tables of cosines and sines."""

    def get_cached_cos_sin(self, seq_len: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """[rows, 1, 1, dim] cosines and sines, with YaRN's scale, as the fused kernel reads them:
        by row number. Each call makes them, because Megatron's kept table holds other rows if it
        was made for another length, or whole by the launcher."""
        dtype = kwargs.get("dtype", torch.get_default_dtype())
        angles, scale = self.forward(seq_len, packed_seq=kwargs.get("packed_seq", False))
        given = kwargs.get("mscale")
        scale = scale if given is None else given
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


class _PositionsOfBatch(RowPositions):
    """A model's rotary embedding that follows the `rope_positions` of a `MagiPackedSeqParams`.

    With any other (or no) packed_seq_params it behaves like the stock module.
    """

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Take the microbatch's positions here, because Megatron calls this before `forward`."""
        packed = next(
            (a for a in (*args, *kwargs.values()) if isinstance(a, MagiPackedSeqParams)), None
        )
        self.positions = None if packed is None else packed.rope_positions
        return super().get_rotary_seq_len(*args, **kwargs)  # type: ignore[misc]


class MagiRotaryEmbedding(_PositionsOfBatch, RotaryEmbedding):  # type: ignore[misc]
    """A model's `RotaryEmbedding` at the positions of a microbatch's rows."""


class MagiYarnRotaryEmbedding(_PositionsOfBatch, YarnRowPositions, YarnRotaryEmbedding):  # type: ignore[misc]
    """A model's `YarnRotaryEmbedding` at the positions of a microbatch's rows."""


class MagiMultimodalRotaryEmbedding(RowPositions, MultimodalRotaryEmbedding):  # type: ignore[misc]
    """A model's `MultimodalRotaryEmbedding`; its caller has the positions of the rows."""

    def forward(self, position_ids: Tensor, mrope_section: list[int], **unused: Any) -> Tensor:
        """[rows, batch, 1, dim] angles.

        Args:
            position_ids: [3, batch, rows of this rank]: time, height and width of every row.

        Raises:
            ValueError: positions of another shape.
        """
        if position_ids.dim() != 3 or len(position_ids) != 3:
            raise ValueError(
                f"mRoPE requires position_ids [3, batch, rows of this rank], got shape "
                f"{tuple(position_ids.shape)}; select them by the plan's rows, as the tokens"
            )
        # Megatron would take two mirrored pieces of them in a larger group.
        alone = SimpleNamespace(size=lambda: 1)
        angles: Tensor = super().forward(position_ids, mrope_section, cp_group=alone)
        return angles


ROTARY_OF: dict[type, Any] = {
    RotaryEmbedding: MagiRotaryEmbedding,
    YarnRotaryEmbedding: MagiYarnRotaryEmbedding,
    MultimodalRotaryEmbedding: MagiMultimodalRotaryEmbedding,
}
"""The embedding at the rows' positions for each kind of Megatron's."""


def rotary_of_rows(stock: Any) -> Any:
    """A model's rotary embedding with the same frequencies that follows its microbatch's rows;
    ``stock`` itself if it is ours.

    Raises:
        NotImplementedError: a rotary embedding that is neither RoPE, YaRN nor mRoPE.
    """
    required = "this plugin requires rope, yarn, mrope, learned absolute or no position embeddings"
    return following_rows(stock, ROTARY_OF, required)


def following_rows(stock: Any, kinds: dict[type, Any], required: str) -> Any:
    """One of magi's kinds with the frequencies of ``stock``, which stays as it is if it has one of
    them already.

    Args:
        kinds: magi's class for each of Megatron's.
        required: the beginning of the error.

    Raises:
        NotImplementedError: ``stock`` is of no such class.
    """
    if isinstance(stock, RowPositions):
        return stock
    if type(stock) not in kinds:
        raise NotImplementedError(
            f"{required}, got {type(stock).__name__}; change position_embedding_type, or rope_type "
            f"of multi-latent attention"
        )
    return kinds[type(stock)].from_stock(stock)
