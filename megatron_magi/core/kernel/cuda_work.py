"""Work lists of the forward on the device: built once per table, head shape and device."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_magi.core.cuda_library import FwdParams
from megatron_magi.core.device_buffer import DeviceBuffer
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.mask.row_ranges import without
from megatron_magi.core.native import solver

L2_BUDGET_BYTES = 32 << 20  # of K and V that may be walked together; the L2 has 50 MiB

# Compiled tiles (rows, keys) by head_dim, each with the time of one step in units of a 128 x 128
# step of head_dim 128. Fitted to one H200 at 16k tokens, docs/kernel_notes.md.
STEP_COST: dict[int, dict[tuple[int, int], float]] = {
    64: {(128, 128): 0.70, (192, 128): 0.90},
    128: {(192, 80): 0.85, (192, 64): 0.72, (128, 128): 1.0},
}
TILE_COST = 0.3  # starting a tile and writing it out
MASKED_COST = 0.07  # a masked step over an unmasked one
FEW_ITEMS = 8  # items per SM below which the last wave matters
MAX_PARTS = 8  # of a split key walk
MERGE_COST = 30.0  # of merging two parts: a few small launches, about 50 us


@dataclass(frozen=True)
class Variant:
    """Which kernel runs, and how it tiles."""

    pack: int  # query heads in one tile's rows
    block_m: int  # query rows per tile, tokens x pack
    block_n: int  # keys per tile


@dataclass(frozen=True)
class Choice:
    """A work list that could run, and its cost (see ``work_cost``)."""

    variant: Variant
    work: solver.FwdWorkList
    cost: float


@dataclass(frozen=True)
class FwdWork:
    """A chosen work list and a params struct with everything in it that calls share."""

    buffer: DeviceBuffer
    params: FwdParams
    variant: Variant
    num_parts: int = 1  # of a split key walk: outputs that the caller merges


@dataclass(frozen=True)
class HeadsKey:
    """What a work list depends on beside the slices."""

    heads_q: int
    heads_kv: int
    head_dim: int
    device_index: int


def fwd_work(table: SliceTable, key: HeadsKey) -> FwdWork:
    """The forward's work list of this table, built and uploaded when first asked for."""
    cached = table.cache.get(("fwd", key))
    if cached is None:
        cached = table.cache[("fwd", key)] = _make(table, key)
    return cached


def candidates(key: HeadsKey) -> list[Variant]:
    """Variants worth trying: heads not packed, or packed as far as they can be."""
    group = key.heads_q // key.heads_kv
    widest = max(pack for pack in (1, 2, 4, 8, 16, 32, 64) if group % pack == 0)
    return [
        Variant(pack, block_m, block_n)
        for pack in sorted({widest, 1}, reverse=True)
        for block_m, block_n in STEP_COST[key.head_dim]
    ]


def work_cost(work: solver.FwdWorkList, key: HeadsKey, variant: Variant, num_sms: int) -> float:
    """Estimated time on one SM, in units of STEP_COST."""
    units = key.heads_q // variant.pack
    step = STEP_COST[key.head_dim][variant.block_m, variant.block_n]
    steps = work.tiles[:, 4]
    if len(steps) == 0:
        return 0.0
    total = units * (step * work.steps + MASKED_COST * work.masked_steps)
    total += units * TILE_COST * len(steps)
    if units * len(steps) > FEW_ITEMS * num_sms:
        return max(total / num_sms, float(step * steps[0] + TILE_COST))
    return _makespan((step * steps + TILE_COST).tolist(), units, num_sms)


def _makespan(costs: list[float], units: int, num_sms: int) -> float:
    """When the last SM is done, if each takes the next item as soon as it is free."""
    free = [0.0] * num_sms
    for cost in costs:
        for _ in range(units):
            heapq.heapreplace(free, free[0] + cost)
    return max(free)


def _make(table: SliceTable, key: HeadsKey) -> FwdWork:
    num_sms = torch.cuda.get_device_properties(key.device_index).multi_processor_count
    choices = [c for variant in candidates(key) for c in _choices(table, key, variant, num_sms)]
    best = min(choices, key=lambda c: c.cost)
    return upload_work(table, key, num_sms, best.variant, best.work)


def _choices(table: SliceTable, key: HeadsKey, variant: Variant, num_sms: int) -> Iterator[Choice]:
    """The variant's work list and, where few tiles leave most SMs idle, the same tiles with long
    walks cut into parts."""
    lists = functools.partial(
        solver.fwd_work_list, table.slices, table.num_q, table.num_k,
        variant.block_m // variant.pack, variant.block_n,
    )  # fmt: skip
    whole = lists()
    yield Choice(variant, whole, work_cost(whole, key, variant, num_sms))
    units = key.heads_q // variant.pack
    even = -(-units * whole.steps // num_sms)  # steps of each SM if it could be even
    longest = int(whole.tiles[0, 4]) if len(whole.tiles) else 0
    max_steps = max(even, -(-longest // MAX_PARTS), 8)
    if longest < 2 * max_steps:
        return
    split = lists(max_steps)
    if split.num_parts * table.num_q < 2**31:
        merging = MERGE_COST * (split.num_parts - 1)
        yield Choice(variant, split, work_cost(split, key, variant, num_sms) + merging)


def upload_work(
    table: SliceTable, key: HeadsKey, num_sms: int, variant: Variant, work: solver.FwdWorkList
) -> FwdWork:
    """Put a work list on the device and fill in the part of the params that never changes."""
    empty_rows = work.empty_rows
    if work.num_parts == 1:
        empty_rows = without(empty_rows, table.left_rows)
    parts = [work.tiles, work.entries, empty_rows]
    offsets = np.cumsum([0] + [-(-p.size // 32) * 32 for p in parts])  # 128-byte aligned
    host = np.zeros(max(int(offsets[-1]), 1), dtype=np.int32)
    for part, offset in zip(parts, offsets[:-1], strict=True):
        host[offset : offset + part.size] = part.ravel()
    device = torch.device("cuda", key.device_index)
    buffer = DeviceBuffer.upload(torch.from_numpy(host), device)
    base = buffer.data.data_ptr()
    params = FwdParams(
        tiles=base,
        entries=base + 4 * int(offsets[1]),
        empty_rows=base + 4 * int(offsets[2]),
        num_q=table.num_q,
        num_k=table.num_k,
        num_heads_q=key.heads_q,
        num_heads_kv=key.heads_kv,
        head_dim=key.head_dim,
        num_tiles=len(work.tiles),
        num_entries=len(work.entries),
        num_empty_ranges=len(empty_rows),
        heads_per_section=heads_per_section(work.active_keys, key),
        pack=variant.pack,
        block_m=variant.block_m,
        block_n=variant.block_n,
        num_sms=num_sms,
    )
    return FwdWork(buffer, params, variant, work.num_parts)


def heads_per_section(active_keys: int, key: HeadsKey) -> int:
    """How many kv heads' K and V fit in the L2 budget, spread evenly over the sections."""
    head_bytes = max(active_keys, 1) * key.head_dim * 2 * 2
    fit = min(max(L2_BUDGET_BYTES // head_bytes, 1), key.heads_kv)
    sections = -(-key.heads_kv // fit)
    return -(-key.heads_kv // sections)


_counters: dict[tuple[int, int], Tensor] = {}


def tile_counter(device: torch.device, stream: int) -> Tensor:
    """int32 [2], zero between launches; one per stream, because a launch counts in it."""
    key = (device.index, stream)
    if key not in _counters:
        # Copied rather than filled there: initcheck, which looks at our kernels only, sees copies.
        with torch.inference_mode(False):
            made = torch.zeros(2, dtype=torch.int32).to(device)
        return _counters.setdefault(key, made)  # of two threads the first one's counts
    return _counters[key]
