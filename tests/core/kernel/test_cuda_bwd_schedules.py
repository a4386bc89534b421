"""The Hopper backward by the schedule of its blocks: splits of a head group, lanes of a section."""

from __future__ import annotations

import copy
import dataclasses
from typing import NamedTuple

import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.native import solver
from tests.core.kernel.cuda_bwd_cases import Case, docs
from tests.core.kernel.test_cuda_bwd import HOPPER, Run
from tests.core.kernel.test_cuda_bwd import _backward as backward_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_split_groups_give_gradients_in_the_dtype_of_q(head_dim: int) -> None:
    """Few keys and many query heads: the parts of a head group are added by another kernel."""
    from megatron_magi.core.kernel.hopper.choice import chosen_backward
    from megatron_magi.core.kernel.hopper.launch_values import HeadsKey

    run = Run(Case("split", masks.causal(1000), heads=(64, 4), head_dim=head_dim))
    key = HeadsKey.of(run.call)
    for deterministic in (False, True):
        assert chosen_backward(run.call.table, key, deterministic).params.num_splits > 1
        run.check(backward_of(run, deterministic=deterministic, dtype=torch.bfloat16))


class Schedule(NamedTuple):
    splits: int
    lanes: int
    in_turns: bool = False
    whole: int = 0
    """Kv heads before them that are not split."""
    band_rows: int = 0


def _scheduled(run: Run, schedule: Schedule) -> Run:
    """The same call with another schedule of its list, in fast mode."""
    from megatron_magi.core.kernel.hopper.choice import scratch_at, upload_backward
    from megatron_magi.core.kernel.hopper.launch_values import HeadsKey

    key, table = HeadsKey.of(run.call), SliceTable.of(run.case.mask)
    work = solver.choose_bwd(
        table.slices,
        table.num_q,
        table.num_k,
        head_dim=key.head_dim,
        may_take_turns=False,
    )
    if schedule.band_rows:
        work = work.in_bands(schedule.band_rows)
    made = upload_backward(table, key, work, False)
    p = made.params
    p.num_splits, p.lanes_per_section, p.in_turns, p.whole_heads = schedule[:4]
    made = dataclasses.replace(made, scratch_at=scratch_at(p))
    table.cache["bwd", key, False] = made
    other = copy.copy(run)
    other.call = run.call._replace(table=table)
    return other


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_splits_of_a_head_may_run_one_after_another(head_dim: int) -> None:
    """A section has whole kv heads, or some lanes of one: the sums of keys are the same bits."""
    run = Run(Case("lanes", docs(700, 300, 24), heads=(16, 2), head_dim=head_dim))
    together = backward_of(_scheduled(run, Schedule(4, 8)))
    for lanes in (1, 2, 4):
        apart = backward_of(_scheduled(run, Schedule(4, lanes)))
        run.check(apart)
        assert all(map(torch.equal, apart[1:], together[1:])), lanes


TURNS = [
    Schedule(2, 1, True),
    Schedule(8, 1, True),
    Schedule(4, 2, True),
    Schedule(4, 8, True),
    Schedule(8, 1, True, whole=1),
    Schedule(1, 1, True, band_rows=64),
    Schedule(1, 2, True, band_rows=200),
    Schedule(4, 1, True, band_rows=192),
    Schedule(2, 4, True, band_rows=500),
]
"""One lane at a time, some lanes, all of them; the last kv head alone; bands of rows."""


@pytest.mark.parametrize("schedule", TURNS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_parts_of_a_tile_take_turns_at_one_sum(head_dim: int, schedule: Schedule) -> None:
    """In the order in which they start, so that bits are equal in every run."""
    value_dim = min(head_dim, 128) if head_dim == 192 else head_dim
    for mask in (docs(700, 300, 24), masks.full(333, 517), masks.sliding_window(900, (99, 0))):
        run = Run(Case("turns", mask, (16, 2), head_dim, value_dim))
        scheduled = _scheduled(run, schedule)
        first = backward_of(scheduled)
        run.check(first)
        for _ in range(3):
            assert all(map(torch.equal, first[1:], backward_of(scheduled)[1:]))
        rounded = backward_of(scheduled, dtype=torch.bfloat16)
        assert all(
            torch.equal(r, x.bfloat16()) for r, x in zip(rounded[1:], first[1:], strict=True)
        )


@pytest.mark.parametrize("lanes", [1, 8, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_turns_add_in_the_order_of_partial_sums(head_dim: int, lanes: int) -> None:
    """A thousand blocks and more on all processors: each reads what all before it have stored."""
    run = Run(Case("order", masks.causal(2048), heads=(64, 8), head_dim=head_dim))
    want = backward_of(_scheduled(run, Schedule(8, 64)))
    run.check(want)
    for _ in range(3):
        made = backward_of(_scheduled(run, Schedule(8, lanes, True)))
        run.check(made)
        # The other one is scaled once instead of for every part.
        unscaled = 1 if head_dim <= 128 else 2
        assert torch.equal(made[unscaled], want[unscaled])


def launched(run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from megatron_magi.core.kernel.hopper.backward import backward

    return backward(run.call, run.grad)


def test_turns_in_a_graph_that_is_replayed() -> None:
    """Every launch counts turns from 0."""
    run = _scheduled(Run(Case("graph", masks.causal(900), heads=(16, 2))), Schedule(8, 2, True))
    want = launched(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = launched(run)
    for _ in range(3):
        for x in made:
            x.fill_(float("nan"))
        graph.replay()
        run.check(made)
        assert all(map(torch.equal, made[1:], want[1:]))


def test_turns_on_two_streams_at_once() -> None:
    """Two launches of one list have counters of their own."""
    run = _scheduled(Run(Case("streams", masks.causal(2048), heads=(64, 8))), Schedule(8, 1, True))
    want = launched(run)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    made = []
    for _ in range(8):
        for stream in streams:
            with torch.cuda.stream(stream):
                made.append(launched(run))
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for m in made for x, y in zip(m[1:], want[1:], strict=True))


@pytest.mark.parametrize("schedule", [Schedule(8, 1, True), Schedule(1, 1, True, band_rows=64)])
def test_turns_while_another_kernel_has_most_processors(schedule: Schedule) -> None:
    """Blocks wait only for blocks that have started, however few run at a time."""
    run = _scheduled(Run(Case("few", masks.causal(1024), heads=(16, 2))), schedule)
    want = launched(run)
    side, busy = torch.cuda.Stream(), torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(20):
            torch.mm(busy, busy)
    made = [launched(run) for _ in range(20)]
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for m in made for x, y in zip(m[1:], want[1:], strict=True))
