"""Which variant and work list a forward or backward on Hopper runs with, and why.

The forward's choice is made here from estimated times, the backward's by the planner's C++ code.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_magi.core.cuda.abi import BwdParams, FwdParams
from megatron_magi.core.cuda.tables import upload_together
from megatron_magi.core.kernel.hopper.launch import BwdLaunch, FwdLaunch, HeadsKey
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


def forward_launch(table: SliceTable, key: HeadsKey) -> FwdLaunch:
    """The forward of this table, chosen and uploaded when first asked for."""
    cached = table.cache.get(("fwd", key))
    if cached is None:
        cached = table.cache["fwd", key] = _choose_forward(table, key)
    return cached


def backward_launch(table: SliceTable, key: HeadsKey, deterministic: bool) -> BwdLaunch:
    """The backward of this table, chosen and uploaded when first asked for."""
    cached = table.cache.get(("bwd", key, deterministic))
    if cached is None:
        cached = _choose_backward(table, key, deterministic)
        table.cache["bwd", key, deterministic] = cached
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


def _choose_forward(table: SliceTable, key: HeadsKey) -> FwdLaunch:
    num_sms = _num_sms(key)
    choices = [c for variant in candidates(key) for c in _choices(table, key, variant, num_sms)]
    best = min(choices, key=lambda c: c.cost)
    return upload_forward(table, key, best.variant, best.work)


def _num_sms(key: HeadsKey) -> int:
    return torch.cuda.get_device_properties(key.device_index).multi_processor_count


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


def upload_forward(
    table: SliceTable, key: HeadsKey, variant: Variant, work: solver.FwdWorkList
) -> FwdLaunch:
    """Put a work list on the device and fill in the part of the parameters that never changes."""
    empty_rows = work.empty_rows
    if work.num_parts == 1:
        empty_rows = without(empty_rows, table.left_rows)
    device = torch.device("cuda", key.device_index)
    tables, addresses = upload_together([work.tiles, work.entries, empty_rows], device)
    params = FwdParams(
        **dict(zip(("tiles", "entries", "empty_rows"), addresses, strict=True)),
        **_shape(table, key),
        num_tiles=len(work.tiles),
        num_entries=len(work.entries),
        num_empty_ranges=len(empty_rows),
        heads_per_section=heads_per_section(work.active_keys, key),
        pack=variant.pack,
        block_m=variant.block_m,
        block_n=variant.block_n,
        num_sms=_num_sms(key),
    )
    return FwdLaunch(tables, params, work.num_parts)


def _shape(table: SliceTable, key: HeadsKey) -> dict[str, int]:
    """Fields of both directions."""
    return {
        "num_q": table.num_q,
        "num_k": table.num_k,
        "num_heads_q": key.heads_q,
        "num_heads_kv": key.heads_kv,
        "head_dim": key.head_dim,
    }


def heads_per_section(active_keys: int, key: HeadsKey) -> int:
    """How many kv heads' K and V fit in the L2 budget, spread evenly over the sections."""
    head_bytes = max(active_keys, 1) * key.head_dim * 2 * 2
    fit = min(max(L2_BUDGET_BYTES // head_bytes, 1), key.heads_kv)
    sections = -(-key.heads_kv // fit)
    return -(-key.heads_kv // sections)


def _choose_backward(table: SliceTable, key: HeadsKey, deterministic: bool) -> BwdLaunch:
    work = solver.bwd_work_list(
        table.slices, table.num_q, table.num_k, *key[:3], _num_sms(key), deterministic
    )
    device = torch.device("cuda", key.device_index)
    tables, addresses = upload_together([work.items, work.entries, work.visits], device)
    params = BwdParams(
        **dict(zip(("items", "entries", "visits"), addresses, strict=True)),
        **_shape(table, key),
        num_items=len(work.items),
        num_splits=work.num_splits,
        heads_per_section=work.heads_per_section,
        deterministic=deterministic,
        num_cells=work.num_cells,
        heads_inner=work.heads_inner,
        descending=work.descending,
    )
    return BwdLaunch(tables, params, _scratch_at(params))


def _scratch_at(p: BwdParams) -> tuple[int, int, int, int]:
    """See BwdLaunch; sizes as in csrc/attention/backward/params.h."""
    stats = 32 * p.num_heads_q * ((p.num_q + 65) // 2 * 2)
    partial = 8 * p.num_splits * p.num_k * p.num_heads_kv * p.head_dim if p.num_splits > 1 else 0
    semaphores = 4 * (1 + 2 * p.num_heads_q * p.num_cells) if p.deterministic else 0
    sizes = [-(-size // 128) * 128 for size in (stats, partial, semaphores)]
    return 0, sizes[0], sum(sizes[:2]), sum(sizes)
