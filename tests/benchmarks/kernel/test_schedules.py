"""The sweep of schedules holds what the choice compares, each with a launch of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.kernel.schedules import FwdSchedule, Schedule, backwards, forwards, in_bands
from megatron_magi import masks
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.hopper.launch_values import HeadsKey
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.native import solver

CPU = torch.device("cpu")
TOKENS = 40960


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose tables stay on the CPU."""
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_schedule_has_its_launch(deterministic: bool) -> None:
    """Of full rows that are long enough for bands."""
    table = SliceTable(masks.full(TOKENS).slices, TOKENS, TOKENS)
    q = torch.empty(0)
    key = HeadsKey(8, 2, 256, 256, CPU)
    tried = backwards(AttnCall(q, q, q, table, 1.0), key, deterministic)
    schedules = {n: Schedule(*s) for n, s in tried.named["schedules"].items()}
    assert set(tried.calls) == set(schedules) and tried.named["num_sms"] == 132
    bands = set(in_bands(Schedule(4, 1, in_turns=True), TOKENS))
    assert bands.isdisjoint(schedules.values()) if deterministic else bands < {*schedules.values()}
    for name, call in tried.calls.items():
        p = call.table.cache["bwd", key, deterministic].params
        s = schedules[name]
        assert s[:4] == (p.num_splits, p.lanes_per_section, bool(p.in_turns), p.whole_heads)
        assert (p.num_items > p.num_tiles) == bool(s.band_rows)


def test_bands_are_whole_query_tiles() -> None:
    split = Schedule(8, 1, in_turns=True)
    assert [s.band_rows for s in in_bands(split, 65536)] == [32768, 21888, 16384]
    for other in (split._replace(lanes=8), split._replace(in_turns=False), Schedule(1, 1)):
        assert not list(in_bands(other, 65536))


def test_the_chosen_one_is_among_them() -> None:
    table = SliceTable(masks.full(TOKENS).slices, TOKENS, TOKENS)
    q = torch.empty(0)
    tried = backwards(AttnCall(q, q, q, table, 1.0), HeadsKey(8, 2, 256, 256, CPU), False)
    made = solver.choose_bwd(table.slices, TOKENS, TOKENS, 8, 2, 256, 132)
    chosen = Schedule(*tried.named["schedules"][tried.chosen])
    assert chosen == (
        made.num_splits, made.lanes_per_section, made.in_turns, made.whole_heads, made.band_rows,
    )  # fmt: skip


def test_every_forward_has_its_launch() -> None:
    """The chosen tile with every number of heads at a time, and every other tile."""
    table = SliceTable(masks.causal(4096).slices, 4096, 4096)
    q = torch.empty(0)
    key = HeadsKey(16, 16, 128, 128, CPU)
    tried = forwards(AttnCall(q, q, q, table, 1.0), key)
    schedules = {n: FwdSchedule(*s) for n, s in tried.named["schedules"].items()}
    assert set(tried.calls) == set(schedules) and tried.named["num_sms"] == 132
    chosen = schedules[tried.chosen]
    assert chosen == FwdSchedule.of(solver.choose_fwd(table.slices, 4096, 4096, *key[:3], 132))
    assert {s.heads for s in schedules.values() if s[:4] == chosen[:4]} >= {1, 2, 4, 8, 16}
    assert {s[:3] for s in schedules.values()} == {*solver.fwd_variants(*key[:3])}
    for name, call in tried.calls.items():
        launch = call.table.cache["fwd", key]
        p = launch.params
        made = p.pack, p.block_m, p.block_n, launch.num_parts, p.heads_per_section
        assert made == schedules[name]
