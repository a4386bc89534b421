"""The test of a cell by FlashAttention-4, compiled by CuTe's compiler; it needs the package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils


@functools.lru_cache(maxsize=64)  # one function for one number, because it is compiled
def visible_cells(num_intervals: int) -> Callable[..., Any]:
    """FlashAttention-4's ``mask_mod`` of rows that see so many intervals of keys."""

    @cute.jit
    def visible(  # type: ignore[no-untyped-def]  # the compiler reads annotations
        batch, head, q, k, lengths, intervals
    ):
        begins, ends = intervals[0], intervals[1]
        row = q[0]
        begin = utils.scalar_to_ssa(begins[0, row], cutlass.Int32)
        end = utils.scalar_to_ssa(ends[0, row], cutlass.Int32)
        seen = (k >= begin) & (k < end)
        for r in cutlass.range_constexpr(1, num_intervals):
            begin = utils.scalar_to_ssa(begins[r, row], cutlass.Int32)
            end = utils.scalar_to_ssa(ends[r, row], cutlass.Int32)
            seen = seen | ((k >= begin) & (k < end))
        return seen

    made: Callable[..., Any] = visible
    return made
