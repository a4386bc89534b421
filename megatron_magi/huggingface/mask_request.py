"""Mask request of a Transformers model: a small object instead of a dense matrix.

Transformers calls a registered mask function once in a forward pass for each kind of layer, and
gives what it returns to every layer of the kind. Ours returns a `MaskRequest`, in which the first
layer leaves the slices of the batch for the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import Tensor

from megatron_magi import AttnMask
from megatron_magi.huggingface.batch_documents import BatchShape, Documents, find_documents

MODULE = "transformers.masking_utils"
CAUSAL = "causal_mask_function"
PACKED = "packed_sequence_mask_function"
HONOURED = {CAUSAL, PACKED, "sliding_window_overlay", "and_masks",
            "remap_positions_for_packed_sequence"}  # fmt: skip
"""The parts of a mask function of Transformers that documents and a window express."""


class NoDenseMask(NotImplementedError, AttributeError):
    """A model does with its mask what needs a dense matrix."""


class MaskRequest:
    """The mask of one kind of layer in one forward pass: causal inside of documents.

    Models that add it to their scores, or read it as a tensor, get `NoDenseMask`. No dataclass,
    because PyTorch's FSDP in mixed precision gives each layer a copy of those.
    """

    def __init__(
        self,
        batch_shape: BatchShape,
        window: int | None = None,
        padding: Tensor | None = None,
        is_packed: bool = False,
    ) -> None:
        self.batch_shape = batch_shape
        """The sequences and tokens of the batch."""
        self.window = window
        """The number of keys that a query sees, its own among them; None: no limit."""
        self.padding = padding
        """bool [sequences, tokens]: False marks padding; None: there is none."""
        self.is_packed = is_packed
        """True if Transformers has found documents in the position ids, so that these must
        arrive."""
        self.has_packed_rows = False
        """True if the mask that was made has several documents in one sequence."""
        self.made: tuple[tuple[Any, Any], AttnMask] | None = None
        """The tensors that named the documents, and the mask that was made of them."""

    def mask(self, position_ids: Tensor | None, cu_seqlens: Tensor | None) -> AttnMask:
        """The same object for every layer that passes the same tensors; see `find_documents`.

        Raises:
            ValueError: packed rows of a model that does not give its layers the position ids.
        """
        given = position_ids, cu_seqlens
        if self.made is None or any(a is not b for a, b in zip(self.made[0], given, strict=True)):
            if self.is_packed and position_ids is None and cu_seqlens is None:
                raise ValueError(
                    "the layers of a packed batch need position_ids, got none: this model does not "
                    "pass them on; pass cu_seq_lens_q to the model, or one document per sequence"
                )
            found = find_documents(self.batch_shape, position_ids, cu_seqlens, self.padding)
            self.has_packed_rows = _are_packed(found, self.batch_shape)
            self.made = (given, found.mask(self.window))
        return self.made[1]

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise cls._as_tensor(getattr(function, "__name__", "an operation"))

    def __getattr__(self, name: str) -> Any:
        raise self._as_tensor(name)

    def __getitem__(self, index: Any) -> Any:
        raise self._as_tensor("an index")

    @classmethod
    def _as_tensor(cls, used: str) -> NoDenseMask:
        return NoDenseMask(
            f"attention by magi needs layers that leave the mask to it, got a model that reads it "
            f"as a tensor ({used}); use another attn_implementation for this model"
        )


def request_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any, **options: Any
) -> MaskRequest:
    """Transformers' mask function for ``attn_implementation="magi"``.

    Raises:
        NotImplementedError: keys of a cache in addition to the batch's, or another mask than causal
            documents and windows.
        ValueError: a padding mask of another length.
    """
    offset = options.get("q_offset", 0)
    if q_length != kv_length or (isinstance(offset, int) and offset != 0):
        raise NotImplementedError(
            f"attention by magi needs the keys of the same {q_length} tokens as its queries, got "
            f"{kv_length} keys, queries from token {offset} on; call the model without a cache, or "
            f"decode after model.set_attn_implementation('sdpa')"
        )
    names = _checked_parts(mask_function, bool(options.get("use_vmap", False)))
    window = options.get("local_size") if "sliding_window_overlay" in names else None
    return MaskRequest(
        BatchShape(batch_size, q_length), window, options.get("attention_mask"), PACKED in names
    )


def _are_packed(found: Documents, batch_shape: BatchShape) -> bool:
    """True if a sequence has two documents or more."""
    sequences = found.cu_seqlens[:-1][~found.is_padding] // batch_shape.num_tokens
    return len(set(sequences.tolist())) < len(sequences)


def _checked_parts(mask_function: Any, is_custom: bool) -> set[str]:
    """The names of the functions that a mask function is made of, if we know them all."""
    names = set(_parts(mask_function))
    others = sorted(names - HONOURED) or ["a function of the model's own"]
    if is_custom or CAUSAL not in names or names - HONOURED:
        raise NotImplementedError(
            f"attention by magi needs causal masks with documents, windows and padding, got a mask "
            f"with {', '.join(others)}; use another attn_implementation for this model, or build "
            f"its mask from megatron_magi.masks in a layer of your own"
        )
    return names


def _parts(function: Any) -> Iterator[str]:
    is_known = getattr(function, "__module__", "") == MODULE
    name = getattr(function, "__qualname__", repr(function))
    yield name.partition(".")[0] if is_known else name
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for inner in held if isinstance(held, (tuple, list)) else (held,):
            if isinstance(inner, FunctionType):
                yield from _parts(inner)
