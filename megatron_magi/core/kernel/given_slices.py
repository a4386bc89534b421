"""The slices of a call, given as slices, as a mask or as ranges."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_magi.checks import instance
from megatron_magi.core.kernel.slice_table import ByIdentity, tensor_of_mask
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.mask.slices import slices_from_ranges
from megatron_magi.core.tensor_checks import on_host, tensor


class SliceRanges(NamedTuple):
    """Ranges of slices, see ``flex_flash_attn_func``."""

    q_ranges: Tensor | None
    k_ranges: Tensor | None
    attn_type_map: Tensor | None

    @property
    def given(self) -> bool:
        return not all(x is None for x in self)


def checked_slices(
    slices: Tensor | AttnMask | None, ranges: SliceRanges, num_q: int, num_k: int
) -> Tensor:
    """int32 [N, 6] of the slices that were given, or of the ranges.

    Raises:
        TypeError, ValueError: what is given does not fit.
    """
    if slices is None:
        return _slices_of_ranges(ranges, num_q, num_k)
    if ranges.given:
        raise ValueError(
            "pass either slices or q_ranges, k_ranges and attn_type_map, got both; drop one"
        )
    if isinstance(slices, AttnMask):
        _check_lengths(slices, num_q, num_k)
        return tensor_of_mask(slices)
    _check_slices(slices)
    return slices


def _check_lengths(mask: AttnMask, num_q: int, num_k: int) -> None:
    if (mask.total_seqlen_q, mask.total_seqlen_k) != (num_q, num_k):
        raise ValueError(
            f"the mask must be for q's {num_q} and k's {num_k} tokens, got one with "
            f"total_seqlen_q = {mask.total_seqlen_q} and total_seqlen_k = {mask.total_seqlen_k}; "
            f"build it for these lengths"
        )


def _check_slices(slices: Tensor) -> None:
    instance(slices, (Tensor, AttnMask), "slices", "make them with slices_tensor(mask)")
    tensor(slices, "slices")
    if slices.dtype != torch.int32 or slices.ndim != 2 or slices.shape[1] != 6:
        raise ValueError(
            f"slices must be int32 [num_slices, 6], got {slices.dtype} {list(slices.shape)}; "
            f"make them with slices_tensor(mask)"
        )


_range_tensors: ByIdentity[tuple[Hashable, object, Tensor]] = ByIdentity()


def _slices_of_ranges(ranges: SliceRanges, num_q: int, num_k: int) -> Tensor:
    """int32 [N, 6] of the ranges, remembered by the objects and their versions."""
    if not ranges.given:
        q_range, k_range = (torch.tensor([[0, n]], device="cpu") for n in (num_q, num_k))
        ranges = SliceRanges(q_range, k_range, None)
    q_ranges = ranges.q_ranges
    if q_ranges is None or ranges.k_ranges is None:
        raise ValueError(
            "q_ranges and k_ranges must both be given, got only one of them; "
            "leave both out for full attention"
        )
    for name, x in zip(SliceRanges._fields, ranges, strict=True):
        if x is not None:
            tensor(x, name)
    is_cacheable = not any(x is not None and x.is_inference() for x in ranges)
    key = None
    if is_cacheable:
        key = tuple((id(x), 0 if x is None else x._version) for x in ranges)
    seen = _range_tensors.get(q_ranges)
    if seen is not None and seen[0] == key:
        return seen[2]
    host = [
        None if x is None else np.asarray(on_host(x, name))
        for name, x in zip(SliceRanges._fields, ranges, strict=True)
    ]
    with torch.inference_mode(False):  # autograd may save it later
        made = torch.from_numpy(slices_from_ranges(*host))  # type: ignore[arg-type]
    if is_cacheable:
        # The other objects are kept alive so that their ids are not reused. The entry's own key is
        # not kept alive, or the entry would live for ever.
        others = [x for x in ranges if x is not q_ranges]
        _range_tensors[q_ranges] = key, others, made
    return made
