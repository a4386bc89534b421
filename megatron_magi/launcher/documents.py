"""Finds the documents of a Megatron batch and makes their mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from megatron_magi.core.mask import AttnMask
from megatron_magi.core.mask.mask import MaskOfLayers
from megatron_magi.launcher.flags import MaskFunction

BY_CU_SEQLENS = ("sft", "dataloader_inter_document_masking")
"""Megatron's arguments under which every sample has cu_seqlens."""
OF_DOCUMENTS = (*BY_CU_SEQLENS, "reset_attention_mask")
"""Megatron's arguments that divide sequences into documents."""


def has_documents(args: Any) -> bool:
    """Returns True if Megatron's arguments divide sequences into documents."""
    return any(getattr(args, name, False) for name in OF_DOCUMENTS)


@dataclass(frozen=True)
class MaskRequest:
    """The argument of a `--magi-mask` function, which every rank calls once a microbatch, and with
    virtual pipeline stages for each of its model chunks.

    It returns an AttnMask, which --window-size narrows in window layers. Or it returns two: of the
    layers without a window, and of the window layers, which --window-size narrows too.

    It must return the same mask on all ranks, because they compare what they planned.
    """

    bounds: tuple[int, ...]
    """Prefix sums of the microbatch's documents (or sequences), first 0, last its tokens."""
    batch: Mapping[str, Any] | None
    """The full rows as Megatron has them on the device, of which a stage has those that it reads;
    None on middle pipeline stages."""

    @property
    def total_seqlen(self) -> int:
        """Tokens of the microbatch."""
        return self.bounds[-1]


def requested_mask(
    function: MaskFunction | None, bounds: list[int], batch: Mapping[str, Any] | None
) -> MaskOfLayers | None:
    """The mask of a `--magi-mask` function, or the masks of both kinds of layers; None without one.

    Raises:
        TypeError: it returned something else than an AttnMask or two.
    """
    if function is None:
        return None
    return checked_masks(function(MaskRequest(tuple(bounds), batch)))


def repeatable(function: MaskFunction) -> MaskFunction:
    """The same function, called twice: every model chunk of a rank asks for a microbatch's mask, so
    that what counts calls or draws numbers would give layers different masks.

    Raises:
        ValueError: it returned two masks for one request.
    """

    def twice(request: MaskRequest) -> MaskOfLayers:
        first, second = (checked_masks(function(request)) for _ in range(2))
        if first != second:
            raise ValueError(
                "the function of --magi-mask must return the same mask for the same request under "
                "virtual pipeline stages, where each model chunk calls it, got two masks; let it "
                "depend on its request alone"
            )
        return first

    return twice


def checked_masks(masks: Any) -> MaskOfLayers:
    """Result of the function of --magi-mask: a mask, or one for each kind of layer."""
    if isinstance(masks, tuple) and len(masks) == 2:
        return checked_mask(masks[0]), checked_mask(masks[1])
    return checked_mask(masks)


def checked_mask(mask: Any, flag: str = "--magi-mask") -> AttnMask:
    """The mask that the function of `flag` returned.

    Raises:
        TypeError: it is no AttnMask.
    """
    if not isinstance(mask, AttnMask):
        raise TypeError(
            f"the function of {flag} must return an AttnMask, got {type(mask).__name__}; "
            f"build one with megatron_magi.masks"
        )
    return mask


def sequence_bounds(sequences: tuple[int, int]) -> list[int]:
    """Boundaries of ``count`` consecutive sequences of ``length`` tokens."""
    count, length = sequences
    return list(range(0, (count + 1) * length, length))


def bounds_of_cu_seqlens(cu_seqlens: Tensor, padded: Tensor | None, total: int) -> list[int]:
    """Boundaries from Megatron's cu_seqlens; a document's padding is a document of its own.

    Args:
        cu_seqlens: int32 [n + 1] or [1, n + 1], often with copies of the last entry at its end.
        padded: the same with the padding of each document; None or equal to cu_seqlens: none.
        total: tokens of the stream; those after the last document form another one.

    Raises:
        ValueError: several samples, each with boundaries of its own; boundaries that do not begin
            with 0, that descend or pass `total`; a document that its padded slot does not hold.

    Cost: waits until the tensors are on the host.
    """
    starts = _one_row(cu_seqlens, "cu_seqlens", total)
    if padded is None:
        return sorted({*starts, total})
    slots = _one_row(padded, "cu_seqlens_padded", total)
    return sorted({*slots, *_ends_in_slots(starts, slots), total})


def _ends_in_slots(starts: list[int], slots: list[int]) -> list[int]:
    """Where documents end in the padded stream. Slots behind the last document are padding."""
    lengths = [end - start for start, end in pairwise(starts)]
    room = [end - start for start, end in pairwise(slots)]
    too_long = [length > (room[i] if i < len(room) else 0) for i, length in enumerate(lengths)]
    if any(too_long):
        raise ValueError(
            f"cu_seqlens_padded must have room for every document of cu_seqlens, got room for "
            f"{room[:8]}... tokens and document {too_long.index(True)} of {lengths[:8]}...; pad "
            f"the same documents in both"
        )
    return [slot + length for slot, length in zip(slots, lengths, strict=False)]


def bounds_of_eod(tokens: Tensor, eod: int) -> list[int]:
    """Boundaries after every end-of-document token, and between the sequences of a batch.

    Args:
        tokens: int64 [batch, length].

    Cost: waits until the tokens are on the host.
    """
    batch, length = tokens.shape
    ends = np.flatnonzero(tokens.reshape(-1).cpu().numpy() == eod) + 1
    return sorted({*ends.tolist(), *sequence_bounds((batch, length))})


def missing_documents() -> ValueError:
    """The error for samples whose cu_seqlens were promised and did not come."""
    return ValueError(
        "--sft and --dataloader-inter-document-masking require cu_seqlens in every sample, got a "
        "sample without them, which would train without a document mask; let the data loader add "
        "cu_seqlens (int32 prefix sums [n + 1] of document lengths), or leave the flag out"
    )


def bounds_of_sample(
    sample: dict[str, Any], eod: int | None, expects_cu_seqlens: bool = False
) -> list[int]:
    """Boundaries of a microbatch as the data loader has it, of the joined stream of its samples.

    Args:
        sample: tokens [batch, length], and cu_seqlens [batch, n + 1] if the loader gives them.
        eod: the end-of-document token, if documents without cu_seqlens end there.
        expects_cu_seqlens: return [] for a sample without them. Raising here would leave the other
            tensor-parallel ranks waiting for it.
    """
    tokens, cu_seqlens = sample["tokens"], sample.get("cu_seqlens")
    if cu_seqlens is None and expects_cu_seqlens:
        return []
    batch, length = tokens.reshape(-1, tokens.shape[-1]).shape
    if cu_seqlens is None:
        if eod is None:
            return sequence_bounds((batch, length))
        return bounds_of_eod(tokens.reshape(batch, length), eod)
    rows = cu_seqlens.reshape(batch, -1)
    padded = sample.get("cu_seqlens_padded")
    slots = [None] * batch if padded is None else padded.reshape(batch, -1)
    found = {0}
    for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        found.update(i * length + bound for bound in bounds_of_cu_seqlens(row, slot, length))
    return sorted(found)


def check_one_stream(cu_seqlens: Tensor) -> None:
    """Raise ValueError for several samples, each with boundaries of its own."""
    if cu_seqlens.dim() == 2 and cu_seqlens.shape[0] != 1:
        raise ValueError(
            f"packed samples must come as one stream, got cu_seqlens of shape "
            f"{tuple(cu_seqlens.shape)}; set --micro-batch-size 1 (this Megatron does not join "
            f"the samples of a microbatch)"
        )


def _one_row(cu_seqlens: Tensor, name: str, total: int) -> list[int]:
    """The checked boundaries without copies of the last one, of which Megatron's loader appends up
    to a sequence's length: 10 ms in a list of 131,073."""
    check_one_stream(cu_seqlens)
    row = cu_seqlens.reshape(-1).cpu().numpy()  # PyTorch would wake its threads for long rows
    if not len(row) or row[0] != 0 or (row[1:] < row[:-1]).any() or row[-1] > total:
        raise ValueError(
            f"{name} must begin with 0, never descend and end within the {total} tokens of the "
            f"stream, got {row[:8].tolist()}... ({len(row)} numbers, the last ones "
            f"{row[-3:].tolist()}); pass prefix sums, with copies of the last one after it, not "
            f"0 or -1"
        )
    num_lower = int(row.searchsorted(row[-1]))
    bounds: list[int] = row[: num_lower + 1].tolist()
    return bounds
