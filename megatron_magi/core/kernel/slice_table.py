"""Slices prepared for the kernels: host values once, device data cached beside them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_magi.core.mask import AttnMask
from megatron_magi.core.mask.slices import IntArray


@dataclass(frozen=True, eq=False)
class SliceTable:
    """Canonical slices over ``num_q`` query rows and ``num_k`` key rows.

    ``cache`` belongs to the backends: work lists and their device copies, keyed by whatever they
    depend on (device, head shape, ...). It lives and dies with the table, so a plan's tables are
    prepared once and reused by every layer and microbatch.
    """

    slices: IntArray
    num_q: int
    num_k: int
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def covered_rows(self) -> list[tuple[int, int]]:
        """Ranges of query rows that some slice covers, ascending."""
        if "covered" not in self.cache:
            ranges: list[tuple[int, int]] = []
            for start, end in sorted(self.slices[:, :2].tolist()):
                if ranges and start <= ranges[-1][1]:
                    ranges[-1] = ranges[-1][0], max(ranges[-1][1], end)
                else:
                    ranges.append((start, end))
            self.cache["covered"] = ranges
        covered: list[tuple[int, int]] = self.cache["covered"]
        return covered


_MAX_TABLES = 256
_by_tensor: WeakIdKeyDictionary = WeakIdKeyDictionary()
_by_content: OrderedDict[tuple[bytes, int, int], SliceTable] = OrderedDict()
_lock = threading.Lock()


def slice_table(slices: Tensor, num_q: int, num_k: int) -> SliceTable:
    """The table of an int32 [N, 6] tensor, validated when first seen.

    A tensor is recognised by its object and version, never by its address, so an in-place change
    is noticed; equal contents share one table. A CUDA tensor costs one copy to the host when it
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
    key = (np.ascontiguousarray(slices).tobytes(), num_q, num_k)
    with _lock:
        if key not in _by_content:
            _by_content[key] = SliceTable(AttnMask(slices, num_q, num_k).slices, num_q, num_k)
            while len(_by_content) > _MAX_TABLES:
                _by_content.popitem(last=False)
        _by_content.move_to_end(key)
        return _by_content[key]


def slices_tensor(mask: AttnMask) -> Tensor:
    """int32 [N, 6] on the CPU; hold on to it and pass it to every call with this mask."""
    return torch.from_numpy(mask.slices.copy())
