"""Slices prepared for the kernels: values on the host, with their device data cached."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_magi.core.kernel.call_key import PreparedCalls
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.mask.mask import check_mask
from megatron_magi.core.mask.row_ranges import joined
from megatron_magi.core.mask.slices import IntArray, as_slices

V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class SliceTable:
    """Canonical slices over ``num_q`` query rows and ``num_k`` key rows.

    ``cache`` belongs to the backends. It holds work lists and their device copies, keyed by
    whatever they depend on (device, head shape, ...). It is freed with the table, so a plan's
    tables are prepared once and reused by every layer and microbatch.
    """

    slices: IntArray
    num_q: int
    num_k: int
    left_rows: IntArray = field(default_factory=lambda: np.zeros((0, 2), np.int32), repr=False)
    """int32 [n, 2], ascending, disjoint: query rows that no slice covers and that the forward need
    not write, because another call does."""
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    calls: PreparedCalls = field(default_factory=PreparedCalls, repr=False)
    """Prepared calls on these slices, by their key, on one device or in a stage of
    many. It must not refer to the table, or both would outlive their last user."""

    @classmethod
    def of(cls, mask: AttnMask) -> SliceTable:
        """A table of all cells of a mask."""
        return cls(mask.slices, mask.total_seqlen_q, mask.total_seqlen_k)

    @cached_property
    def covered_rows(self) -> IntArray:
        """int32 [n, 2], ascending: query rows that some slice covers."""
        return joined(self.slices[:, :2])

    def cached(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value that ``make`` returned when this key was first asked for."""
        if key not in self.cache:
            with torch.inference_mode(False):  # later calls may save its tensors for backward
                self.cache[key] = make()
        found: V = self.cache[key]
        return found


class ByIdentity(Generic[V]):
    """A dictionary whose keys are objects themselves, not what they equal, and are not kept alive.

    ``torch.utils.weak.WeakIdKeyDictionary`` is one too; a lookup in it takes a few microseconds,
    which every attention call would pay several times.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def get(self, key: object) -> V | None:
        """The object's value, or None."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def __setitem__(self, key: object, value: V) -> None:
        number = id(key)

        def forget(ended: weakref.ref[Any]) -> None:
            entry = self._entries.get(number)
            if entry is not None and entry[0] is ended:
                del self._entries[number]

        self._entries[number] = weakref.ref(key, forget), value

    def __len__(self) -> int:
        return len(self._entries)


_by_tensor: ByIdentity[tuple[int, SliceTable]] = ByIdentity()
_tensors: ByIdentity[Tensor] = ByIdentity()


def slice_table(slices: Tensor, num_q: int, num_k: int) -> SliceTable:
    """The table of an int32 [N, 6] tensor, validated when first seen.

    A tensor is recognised by its object and version, never by its address, so an in-place change
    is noticed, except what torch does not count: writes through numpy, and to ``.data``. Equal
    contents share one table. A CUDA tensor costs one copy to the host when it
    is first seen.

    Raises:
        ValueError: out-of-bounds or overlapping slices (see ``AttnMask``).
    """
    table = seen_table(slices)
    if table is None or (table.num_q, table.num_k) != (num_q, num_k):
        table = _from_content(slices.detach().cpu().numpy(), num_q, num_k)
        if not slices.is_inference():
            _by_tensor[slices] = (slices._version, table)
    return table


def seen_table(slices: Tensor) -> SliceTable | None:
    """The table that was last made of a tensor; None: there is none, or the tensor has changed."""
    seen = _by_tensor.get(slices)
    return seen[1] if seen is not None and seen[0] == slices._version else None


def _from_content(slices: IntArray, num_q: int, num_k: int) -> SliceTable:
    return _from_bytes(as_slices(slices).tobytes(), num_q, num_k)


@lru_cache(maxsize=256)
def _from_bytes(content: bytes, num_q: int, num_k: int) -> SliceTable:
    slices = np.frombuffer(content, np.int32).reshape(-1, 6)
    return SliceTable.of(AttnMask(slices, num_q, num_k))


def slices_tensor(mask: AttnMask) -> Tensor:
    """int32 [N, 6] on the CPU; keep it and pass it to every call with this mask."""
    check_mask(mask)
    return torch.from_numpy(mask.slices.copy())


def tensor_of_mask(mask: AttnMask) -> Tensor:
    """``slices_tensor``, made once for every mask object."""
    found = _tensors.get(mask)
    if found is None:
        with torch.inference_mode(False):  # autograd may save it later
            found = slices_tensor(mask)
        _tensors[mask] = found
    return found
