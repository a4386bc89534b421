"""Finds the documents of a batch in the arguments of a model's forward.

B sequences of S tokens are one stream of B * S rows here, row after row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_magi import AttnMask, masks
from megatron_magi.checks import integer, integers
from megatron_magi.core.tensor_checks import on_host, tensor

BoolArray = npt.NDArray[np.bool_]


class BatchShape(NamedTuple):
    """The shape of a batch of token ids."""

    num_sequences: int
    num_tokens: int
    """Of every sequence, padding included."""


@dataclass(frozen=True)
class Documents:
    """The documents of a batch as runs of rows; runs of padding are among them."""

    cu_seqlens: npt.NDArray[np.int64]
    """int64 [number of runs + 1]: prefix sums of the runs' rows."""
    is_padding: BoolArray
    """bool [number of runs]: whether a run is padding, which sees nothing and is seen by nobody."""

    def mask(self, window: int | None = None) -> AttnMask:
        """Causal attention inside every document.

        Args:
            window: the number of keys that a query sees, its own among them; None: no limit.

        Raises:
            ValueError, TypeError: a window below 1, or that is no integer.
        """
        if window is not None:
            integer(window, "window", 1)
        left = -1 if window is None else window - 1
        mask = masks.from_cu_seqlens(self.cu_seqlens, window_size=(left, 0))
        if not self.is_padding.any():
            return mask
        pads = self.cu_seqlens[:-1][self.is_padding]
        slices = mask.slices[~np.isin(mask.slices[:, 0], pads)]
        return AttnMask(slices, mask.total_seqlen_q, mask.total_seqlen_k)


def find_documents(
    batch_shape: BatchShape,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    padding: Tensor | None = None,
) -> Documents:
    """The documents of a batch of B sequences of S tokens.

    Args:
        batch_shape: B sequences of S tokens.
        position_ids: integer [B, S] or [1, S]; a document begins wherever the position is not one
            more than that before it. None: every sequence is one document.
        cu_seqlens: integer [number of documents + 1], prefix sums over the B * S rows, instead of
            position_ids, which are then not looked at.
        padding: bool or integer [B, S], 1 for tokens and 0 for padding, which may stand at the
            beginning and at the end of a sequence. None: there is none.

    Raises:
        TypeError: something else than tensors of integers, such as a mask of floats that are added.
        ValueError: shapes that do not fit the batch, prefix sums that do not end at B * S, padding
            between tokens, or numbers in it other than 0 and 1.

    Cost: tensors of a GPU are copied to the host, which waits for them.
    """
    batch_shape = _checked_shape(batch_shape)
    starts = np.zeros(batch_shape, dtype=np.bool_)
    starts[:, :1] = True
    if cu_seqlens is not None:
        starts.reshape(-1)[_checked_prefix_sums(cu_seqlens, starts.size)[:-1]] = True
    elif position_ids is not None:
        positions = _rows_on_host(position_ids, "position_ids", batch_shape)
        starts[:, 1:] |= np.diff(positions, axis=1) != 1
    pads = np.zeros(batch_shape, dtype=np.bool_)
    if padding is not None:
        pads = _checked_padding(padding, batch_shape)
        starts[:, 1:] |= pads[:, 1:] != pads[:, :-1]
    first = np.flatnonzero(starts)
    return Documents(np.append(first, starts.size), pads.reshape(-1)[first])


def _checked_shape(batch_shape: Any) -> BatchShape:
    sizes = integers(batch_shape, "batch_shape")
    if len(sizes) != 2 or min(sizes) < 0:
        raise ValueError(
            f"batch_shape must be the numbers of sequences and of tokens, got {sizes}; pass "
            f"input_ids.shape"
        )
    return BatchShape(*sizes)


def _checked_prefix_sums(cu_seqlens: Tensor, num_rows: int) -> npt.NDArray[np.int64]:
    sums = _integers_on_host(cu_seqlens, "cu_seq_lens_q")
    are_sums = sums.ndim == 1 and len(sums) > 1 and (np.diff(sums) >= 0).all()
    if not are_sums or sums[0] != 0 or sums[-1] != num_rows:
        raise ValueError(
            f"cu_seq_lens_q must ascend from 0 to the {num_rows} rows of the batch, got "
            f"{sums.tolist()[:8]} (shape {list(sums.shape)}); pass the prefix sums of all documents"
        )
    return sums[np.append(np.diff(sums) > 0, True)]


def _rows_on_host(rows: Tensor, name: str, batch_shape: BatchShape) -> npt.NDArray[np.int64]:
    host = _integers_on_host(rows, name)
    if host.shape not in (batch_shape, (1, batch_shape.num_tokens)):
        raise ValueError(
            f"{name} must be [{batch_shape[0]}, {batch_shape[1]}], as the batch, got "
            f"{list(host.shape)}; pass one number for each token"
        )
    return np.broadcast_to(host, batch_shape)


def _integers_on_host(numbers: Tensor, name: str) -> npt.NDArray[np.int64]:
    tensor(numbers, name)
    if numbers.is_floating_point() or numbers.is_complex():
        raise TypeError(
            f"{name} must have integers, got {numbers.dtype}; convert it (an attention_mask has 1 "
            f"for tokens and 0 for padding, and is not added to scores)"
        )
    return on_host(numbers, name).numpy().astype(np.int64)


def _checked_padding(padding: Tensor, batch_shape: BatchShape) -> BoolArray:
    numbers = _rows_on_host(padding, "attention_mask", batch_shape)
    if ((numbers != 0) & (numbers != 1)).any():
        raise ValueError(
            f"attention_mask must have 1 for tokens and 0 for padding, got up to {numbers.max()}; "
            f"name documents by position_ids that restart, or by cu_seq_lens_q"
        )
    is_token = numbers != 0
    runs = np.diff(is_token.astype(np.int8), axis=1, prepend=0)
    holed = np.flatnonzero((runs == 1).sum(axis=1) > 1)
    if len(holed):
        raise ValueError(
            f"the padding of attention_mask must stand at the beginning and the end of a sequence, "
            f"got padding between tokens in sequence {holed[0]}; leave it out there, or begin a "
            f"new document in position_ids"
        )
    return ~is_token
