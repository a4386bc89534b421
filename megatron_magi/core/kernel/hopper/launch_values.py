"""The choices for a launch on Hopper, as values, and helpers that every launch needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.core.cuda.abi import BwdParams, FwdParams
from megatron_magi.core.cuda.tables import DeviceBuffer
from megatron_magi.core.kernel.backend import AttnCall

logger = logging.getLogger("megatron_magi")


class HeadsKey(NamedTuple):
    """Inputs of a launch besides the slices."""

    heads_q: int
    heads_kv: int
    head_dim: int
    value_dim: int
    device: torch.device

    @classmethod
    def of(cls, call: AttnCall) -> HeadsKey:
        q = call.q
        return cls(q.shape[1], call.k.shape[1], q.shape[2], call.v.shape[2], q.device)


@dataclass(frozen=True)
class ChosenForward:
    """A forward: its work list on the device, and the parameters that all calls share."""

    tables: DeviceBuffer
    params: FwdParams
    num_parts: int = 1
    """Number of outputs that the caller merges: above 1 if long walks were cut into parts."""

    def __str__(self) -> str:
        p = self.params
        return (
            f"forward, head_dim {p.head_dim}: {p.num_tiles} tiles of {p.block_m} rows ({p.pack} "
            f"heads packed) x {p.block_n} keys, {p.heads_per_section} key heads at a time, "
            f"{self.num_parts} parts"
        )


@dataclass(frozen=True)
class ChosenBackward:
    """A backward: its work list on the device, and the parameters that all calls share."""

    tables: DeviceBuffer
    params: BwdParams
    scratch_at: tuple[int, int, int, int]
    """Where the parts of a call's scratch memory begin, in bytes: stats, partial sums, semaphores,
    and the fp32 sum of dq where that is not an output."""

    def __str__(self) -> str:
        p = self.params
        return (
            f"backward, head_dim {p.head_dim}: {p.num_items} items, {p.num_splits} splits"
            f"{' in turns' if p.in_turns else ''}, {p.lanes_per_section} lanes at a time"
            f"{f' after {p.whole_heads} whole key heads' if p.whole_heads else ''}"
            f"{', deterministic' if p.deterministic else ''}"
        )


def out_shape(call: AttnCall) -> tuple[int, int, int]:
    """[T, H, E]"""
    return (*call.q.shape[:2], call.v.shape[2])


def new_of(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """Allocates contiguous uninitialised tensors, in two thirds of the host time of torch.empty
    or less."""
    strides = tuple(accumulate((max(n, 1) for n in shape[:0:-1]), mul, initial=1))[::-1]
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def aligned(x: Tensor) -> Tensor:
    """``x``, copied only if the copy engine cannot read it (16-byte base and strides)."""
    if is_aligned(x):
        return x
    _say_copied()
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1)
def _say_copied() -> None:
    logger.warning(
        "attention copies tensors that the kernels cannot read in place, in this call and in later "
        "ones: rows must begin at multiples of 16 bytes, and none may be expanded, as a gradient "
        "of out.sum() is"
    )


def is_aligned(x: Tensor) -> bool:
    """True if base and strides are multiples of 16 bytes, and columns neighbours."""
    return x.data_ptr() % 16 == 0 and has_aligned_rows(x)


def has_aligned_rows(x: Tensor) -> bool:
    """``is_aligned`` of a tensor that begins at a multiple of 16 bytes, by its form alone."""
    token, head, column = x.stride()
    step = 16 // x.element_size()
    return token % step == 0 and head % step == 0 and token > 0 and head > 0 and column == 1


_counters: dict[tuple[int, int], Tensor] = {}


def tile_counter(device: torch.device, stream: int, captured: bool = False) -> Tensor:
    """int32 [2], zero between launches; one per stream, because a launch counts in it. A launch
    that is captured into a CUDA graph has its own, in the graph's memory, which every replay
    clears."""
    if captured:
        return torch.zeros(2, dtype=torch.int32, device=device)
    found = _counters.get((device.index, stream))
    if found is None:
        # Copied from the host, not filled on the device: initcheck, which is restricted to magi's
        # kernels, would not see a fill kernel, but it sees copies.
        with torch.inference_mode(False):
            made = torch.zeros(2, dtype=torch.int32, device="cpu").to(device)
        # If two threads make it at once, both use the result of the first.
        found = _counters.setdefault((device.index, stream), made)
    return found
