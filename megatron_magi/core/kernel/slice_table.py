"""Slices prepared for the kernels: values on the host, with device data cached beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_magi.core.kernel.by_identity import ByIdentity
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.mask.mask import check_mask
from megatron_magi.core.mask.row_ranges import joined
from megatron_magi.core.mask.slices import IntArray, as_slices


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

    @cached_property
    def covered_rows(self) -> IntArray:
        """int32 [n, 2], ascending: query rows that some slice covers."""
        return joined(self.slices[:, :2])


_by_tensor: ByIdentity[tuple[int, int, int, SliceTable]] = ByIdentity()


def slice_table(slices: Tensor, num_q: int, num_k: int) -> SliceTable:
    """The table of an int32 [N, 6] tensor, validated when first seen.

    A tensor is recognised by its object and version, never by its address, so an in-place change
    is noticed, except what torch does not count: writes through numpy, and to ``.data``. Equal
    contents share one table. A CUDA tensor costs one copy to the host when it
    is first seen.

    Raises:
        ValueError: out-of-bounds or overlapping slices (see ``AttnMask``).
    """
    version = -1 if slices.is_inference() else slices._version
    seen = _by_tensor.get(slices) if version >= 0 else None
    if seen is not None and seen[:3] == (version, num_q, num_k):
        return seen[3]
    table = _from_content(slices.detach().cpu().numpy(), num_q, num_k)
    if version >= 0:
        _by_tensor[slices] = (version, num_q, num_k, table)
    return table


def _from_content(slices: IntArray, num_q: int, num_k: int) -> SliceTable:
    return _from_bytes(as_slices(slices).tobytes(), num_q, num_k)


@lru_cache(maxsize=256)
def _from_bytes(content: bytes, num_q: int, num_k: int) -> SliceTable:
    slices = np.frombuffer(content, np.int32).reshape(-1, 6)
    return SliceTable(AttnMask(slices, num_q, num_k).slices, num_q, num_k)


def slices_tensor(mask: AttnMask) -> Tensor:
    """int32 [N, 6] on the CPU; keep it and pass it to every call with this mask."""
    check_mask(mask)
    return torch.from_numpy(mask.slices.copy())
