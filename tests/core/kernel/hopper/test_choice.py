"""The work list and parameters of a launch: those of its table and heads, chosen once."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_magi import masks
from megatron_magi.core.kernel.hopper.choice import chosen_backward, chosen_forward, scratch_at
from megatron_magi.core.kernel.hopper.launch_values import HeadsKey
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.native import solver
from tests.core.kernel import abi_on_cpu
from tests.core.kernel.hopper.launch_cases import NAMED, case


@pytest.mark.parametrize("widths", [(128, 128), (192, 128), (256, 256)], ids=str)
def test_few_keys_and_many_heads_are_split(
    widths: tuple[int, int], library: abi_on_cpu.CpuLibrary
) -> None:
    call, _ = case(masks.causal(1000), heads=(64, 4), widths=widths)
    launch = chosen_backward(call.table, HeadsKey.of(call), False)
    assert launch.params.num_splits > 1
    stats, partial, semaphores, end = launch.scratch_at
    assert partial - stats >= 32 * 64 * 1000 and end == semaphores
    assert semaphores - partial >= 4 * launch.params.num_splits * 1000 * 4 * sum(widths)


@pytest.mark.parametrize(
    "widths, most", [((64, 64), 128), ((192, 128), 128), ((256, 256), 64)], ids=str
)
def test_the_backward_has_key_tiles_of_its_kernel(
    widths: tuple[int, int], most: int, library: abi_on_cpu.CpuLibrary
) -> None:
    call, _ = case(NAMED["packed"], widths=widths)
    p = chosen_backward(call.table, HeadsKey.of(call), False).params
    rows = abi_on_cpu.table(p.items, p.num_items, abi_on_cpu.ITEM)[:, 1]
    assert rows.max() == most and rows.sum() == 200


def test_a_launch_is_chosen_once(library: abi_on_cpu.CpuLibrary) -> None:
    call, _ = case(NAMED["causal"])
    key = HeadsKey.of(call)
    assert chosen_forward(call.table, key) is chosen_forward(call.table, HeadsKey.of(call))
    fast, exact_bits = (chosen_backward(call.table, key, mode) for mode in (False, True))
    assert fast is chosen_backward(call.table, key, False) and fast is not exact_bits


@pytest.mark.parametrize("name", ["causal", "packed", "rows that see nothing"])
def test_a_forward_has_the_chosen_list_and_tiles(name: str, library: abi_on_cpu.CpuLibrary) -> None:
    """On the device, in the order of the planner; dimensions are those of table and heads."""
    call, _ = case(NAMED[name], heads=(8, 2), widths=(192, 128))
    table, p = call.table, chosen_forward(call.table, HeadsKey.of(call)).params
    chosen = solver.choose_fwd(table.slices, table.num_q, table.num_k, 8, 2, 192, 132)
    assert (p.pack, p.block_m, p.block_n) == (chosen.pack, chosen.block_m, chosen.block_n)
    assert (p.num_q, p.num_k) == (table.num_q, table.num_k)
    assert (p.num_heads_q, p.num_heads_kv, p.head_dim, p.value_dim) == (8, 2, 192, 128)
    assert (p.heads_per_section, p.num_sms) == (chosen.heads_per_section, 132)
    work = chosen.work
    on_device = [
        abi_on_cpu.table(p.tiles, p.num_tiles, abi_on_cpu.TILE),
        abi_on_cpu.table(p.entries, abi_on_cpu.num_entries(p), abi_on_cpu.ENTRY),
        abi_on_cpu.table(p.empty_rows, p.num_empty_ranges, 2),
    ]
    for got, want in zip(on_device, (work.tiles, work.entries, work.empty_rows), strict=True):
        assert np.array_equal(got, want)


def test_rows_that_another_call_writes_are_left(library: abi_on_cpu.CpuLibrary) -> None:
    call, _ = case(NAMED["rows that see nothing"])
    key, mask = HeadsKey.of(call), NAMED["rows that see nothing"]
    left = np.array([[0, 4], [100, 120]], np.int32)
    tables = [SliceTable(mask.slices, 120, 64), SliceTable(mask.slices, 120, 64, left)]
    empty = []
    for table in tables:
        launch = chosen_forward(table, key)
        found = abi_on_cpu.table(launch.params.empty_rows, launch.params.num_empty_ranges, 2)
        empty.append(found.tolist())
    assert empty == [[[0, 10], [90, 120]], [[4, 10], [90, 100]]]


@pytest.mark.parametrize("deterministic", [False, True])
def test_scratch_memory_is_as_large_as_its_parts(
    deterministic: bool, library: abi_on_cpu.CpuLibrary
) -> None:
    """As csrc/attention/backward/params.h has it; semaphores are for equal bits alone."""
    call, _ = case(NAMED["packed"], heads=(2, 2))
    launch = chosen_backward(call.table, HeadsKey.of(call), deterministic)
    p = launch.params
    assert p.deterministic == deterministic and p.num_splits == 1
    stats, partial, semaphores, end = launch.scratch_at
    assert stats == 0 and partial == semaphores == 32 * 2 * 264 and partial % 128 == 0
    used = 4 * (1 + 2 * 2 * p.num_row_groups) if deterministic else 0
    assert 0 <= end - semaphores - used < 128 and end % 128 == 0


def test_parts_in_turns_have_one_sum_for_a_tile_and_its_heads(
    library: abi_on_cpu.CpuLibrary,
) -> None:
    """Counters: a ticket, and one for each sum."""
    call, _ = case(NAMED["packed"], heads=(8, 2))
    launch = chosen_backward(call.table, HeadsKey.of(call), False)
    p = launch.params
    for p.num_splits, p.lanes_per_section, heads in ((4, 1, 1), (4, 4, 1), (2, 4, 2)):
        p.in_turns, p.num_tiles = 1, 132
        _, partial, semaphores, end = scratch_at(p)
        assert semaphores - partial == 4 * 132 * heads * 128 * (p.head_dim + p.value_dim)
        assert 0 <= end - semaphores - 4 * (1 + 132 * heads) < 128
    assert "4 splits in turns" not in str(launch) and "2 splits in turns" in str(launch)
