"""The work list and parameters of a launch on Hopper: made in csrc/schedule, uploaded here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from megatron_magi.core.cuda.abi import BwdParams, FwdParams
from megatron_magi.core.cuda.tables import DeviceTable, upload_together
from megatron_magi.core.kernel.hopper.launch_values import ChosenBackward, ChosenForward, HeadsKey
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.mask.row_ranges import without
from megatron_magi.core.native import solver


class Variant(NamedTuple):
    """Choice of the forward kernel and its tiles."""

    pack: int
    """Query heads that share one tile's rows."""
    block_m: int
    """Query rows of a tile, tokens x pack."""
    block_n: int
    """Keys of a tile."""


def chosen_forward(table: SliceTable, key: HeadsKey) -> ChosenForward:
    """The forward of this table, chosen and uploaded when first asked for."""
    return table.cached(("fwd", key), partial(_choose_forward, table, key))


def chosen_backward(table: SliceTable, key: HeadsKey, deterministic: bool) -> ChosenBackward:
    """The backward of this table, chosen and uploaded when first asked for."""
    make = partial(_choose_backward, table, key, deterministic)
    return table.cached(("bwd", key, deterministic), make)


def _choose_forward(table: SliceTable, key: HeadsKey) -> ChosenForward:
    chosen = solver.choose_fwd(table.slices, table.num_q, table.num_k, *key[:3], _num_sms(key))
    variant = Variant(chosen.pack, chosen.block_m, chosen.block_n)
    return upload_forward(table, key, variant, chosen.work, chosen.heads_per_section)


def upload_forward(
    table: SliceTable,
    key: HeadsKey,
    variant: Variant,
    work: solver.FwdWorkList,
    heads_per_section: int = 1,
) -> ChosenForward:
    """Put a work list on the device and fill in the part of the parameters that never changes."""
    empty_rows = work.empty_rows
    if work.num_parts == 1:
        empty_rows = without(empty_rows, table.left_rows)
    tables = upload_together([work.tiles, work.entries, empty_rows], key.device)
    params = FwdParams(
        **dict(zip(("tiles", "entries", "empty_rows"), _addresses(tables), strict=True)),
        **_shape(table, key),
        **variant._asdict(),
        num_tiles=len(work.tiles),
        num_empty_ranges=len(empty_rows),
        heads_per_section=heads_per_section,
        num_sms=_num_sms(key),
    )
    return ChosenForward(tables[0].buffer, params, work.num_parts)


def _addresses(tables: Sequence[DeviceTable]) -> list[int]:
    return [table.address for table in tables]


def _num_sms(key: HeadsKey) -> int:
    return torch.cuda.get_device_properties(key.device).multi_processor_count


def _shape(table: SliceTable, key: HeadsKey) -> dict[str, int]:
    """The fields that forward and backward share."""
    return {
        "num_q": table.num_q,
        "num_k": table.num_k,
        "num_heads_q": key.heads_q,
        "num_heads_kv": key.heads_kv,
        "head_dim": key.head_dim,
        "value_dim": key.value_dim,
    }


def _choose_backward(table: SliceTable, key: HeadsKey, deterministic: bool) -> ChosenBackward:
    numbers = table.num_q, table.num_k, *key[:3], _num_sms(key)
    work = solver.choose_bwd(table.slices, *numbers, deterministic=deterministic)
    return upload_backward(table, key, work, deterministic)


def upload_backward(
    table: SliceTable, key: HeadsKey, work: solver.BwdWorkList, deterministic: bool
) -> ChosenBackward:
    """Put a backward's work list on the device and fill in the parameters that never change."""
    names = ["items", "entries", "places", "turns", "segments"]
    tables = upload_together([getattr(work, name) for name in names], key.device)
    params = BwdParams(
        **dict(zip(names, _addresses(tables), strict=True)),
        **_shape(table, key),
        num_items=len(work.items),
        num_tiles=work.num_tiles,
        num_splits=work.num_splits,
        lanes_per_section=work.lanes_per_section,
        in_turns=work.in_turns,
        whole_heads=work.whole_heads,
        deterministic=deterministic,
        num_row_groups=work.num_row_groups,
        heads_inner=work.heads_inner,
        descending=work.descending,
    )
    return ChosenBackward(tables[0].buffer, params, scratch_at(params))


def scratch_at(p: BwdParams) -> tuple[int, int, int, int]:
    """See ``ChosenBackward.scratch_at``; sizes are those of csrc/attention/backward/params.h."""
    # 32 bytes: two kinds of stats of 16 each.
    stats = 32 * p.num_heads_q * ((p.num_q + 65) // 2 * 2)
    rows, counters = (_sums_in_turns if p.in_turns else _sums_at_once)(p)
    partial = 4 * rows * (p.head_dim + p.value_dim)
    sizes = [-(-size // 128) * 128 for size in (stats, partial, 4 * counters)]
    return 0, sizes[0], sum(sizes[:2]), sum(sizes)


def _sums_at_once(p: BwdParams) -> tuple[int, int]:
    """Rows of partial sums, one for each split, and counters."""
    counters = 1 + 2 * p.num_heads_q * p.num_row_groups if p.deterministic else 0
    rows = p.num_k * p.num_heads_kv * p.num_splits if p.num_splits > 1 else 0
    return rows, counters


def _sums_in_turns(p: BwdParams) -> tuple[int, int]:
    """The same for parts that take turns: one sum for each tile and kv head of a section."""
    sums = p.num_tiles * max(1, p.lanes_per_section // p.num_splits)
    return sums * solver.bwd_tile_k(p.head_dim), 1 + sums
