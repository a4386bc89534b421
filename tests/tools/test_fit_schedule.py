"""The costs are fitted by the choice that runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernel.schedules import FwdSchedule, Schedule, compared, compared_forwards
from benchmarks.lib.masks import MASKS
from megatron_magi import masks
from megatron_magi.core.kernel.hopper.launch_values import HeadsKey
from megatron_magi.core.native import solver
from tools import fit_schedule
from tools.schedule_cells import Cell, Costs, cell_of, cells_of, forward_cell

CASES = [
    (mask, seqlen, heads)
    for mask in ("full", "causal", "packed_causal", "packed_full", "swa1024", "block_sparse")
    for seqlen, heads in ((4096, (64, 8, 128)), (16384, (16, 4, 256)), (16384, (16, 16, 192)))
]


def row_of(mask: str, seqlen: int, heads: tuple[int, int, int], deterministic: bool) -> Any:
    """What the sweep writes, with as many ms as there were schedules before."""
    key = HeadsKey(*heads, heads[2], torch.device("cpu"))
    slices, lengths = MASKS[mask](seqlen).slices, (seqlen, seqlen)
    schedules = compared(slices, lengths, key, 132, deterministic)
    return row_with(schedules, "deterministic" if deterministic else "bwd", mask, seqlen, heads)


def forward_row(mask: str, seqlen: int, heads: tuple[int, int, int]) -> Any:
    """The same of a forward."""
    key = HeadsKey(*heads, heads[2], torch.device("cpu"))
    made = compared_forwards(MASKS[mask](seqlen).slices, (seqlen, seqlen), key, 132)
    return row_with(list(made), "fwd", mask, seqlen, heads)


def row_with(
    schedules: Sequence[Schedule | FwdSchedule],
    direction: str,
    mask: str,
    seqlen: int,
    heads: tuple[int, int, int],
) -> Any:
    return {
        "direction": direction, "heads": list(heads[:2]),
        "widths": [heads[2], heads[2]], "mask": mask, "seqlen": seqlen, "num_sms": 132,
        "ms": {s.name(): 1.0 + i for i, s in enumerate(schedules)},
        "schedules": {s.name(): list(s) for s in schedules},
    }  # fmt: skip


def cell_with(costs: Costs, row: Any) -> Cell:
    """The cell, if the schedules took what they would with these costs."""
    cell = forward_cell(row) if row["direction"] == "fwd" else cell_of(row)
    return Cell(cell.name, cell.alternatives, cell.compared(costs)[1])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("mask", "seqlen", "heads"), CASES)
def test_a_replay_chooses_what_runs(
    mask: str, seqlen: int, heads: tuple[int, int, int], deterministic: bool
) -> None:
    cell = cell_of(row_of(mask, seqlen, heads, deterministic))
    made = solver.choose_bwd(
        MASKS[mask](seqlen).slices, seqlen, seqlen, *heads, 132, deterministic=deterministic
    )
    runs = made.num_splits, made.lanes_per_section, made.in_turns, made.whole_heads, made.band_rows
    assert cell.chosen({}) == runs
    assert cell.has_choice()
    assert cell.loss({}) == 0  # the sweep names the chosen one first, and it has the least ms


@pytest.mark.parametrize(("mask", "seqlen", "heads"), CASES)
def test_a_replay_chooses_the_forward_that_runs(
    mask: str, seqlen: int, heads: tuple[int, int, int]
) -> None:
    cell = forward_cell(forward_row(mask, seqlen, heads))
    slices = MASKS[mask](seqlen).slices
    assert cell.chosen({}) == FwdSchedule.of(solver.choose_fwd(slices, seqlen, seqlen, *heads, 132))
    assert cell.has_choice() and cell.loss({}) == 0
    assert len({s[:3] for s in cell.ms}) == len(solver.fwd_variants(*heads))


def test_other_costs_choose_another_forward() -> None:
    cell = forward_cell(forward_row("full", 16384, (16, 16, 128)))
    base = cell.chosen({})
    assert isinstance(base, FwdSchedule) and base[1:3] == (192, 80)
    assert cell.chosen({"step_128_192_80": 2.0})[1:3] == (128, 128)
    assert cell.chosen({"section_bytes": math.inf}) == base._replace(heads=16)
    fewest = {"section_bytes": 0.0, "few_items": 0.0}
    assert cell.chosen(fewest) == base._replace(heads=1)


def test_a_long_walk_in_parts_is_an_alternative_until_merging_costs_too_much() -> None:
    slices = masks.full(64, 131072).slices
    made = solver.FwdAlternatives(slices, (64, 131072), (2, 1, 128), 132)
    parts = {c.work.num_parts for c in made.choices({}) if c.work.num_parts > 1}
    assert parts and max(parts) <= 8
    least = {cost: min(made.choices({"merge_cost": cost}), key=lambda c: c.cost)
             for cost in (30.0, 1e6)}  # fmt: skip
    assert least[30.0].work.num_parts > 1 == least[1e6].work.num_parts
    assert {c.work.num_parts for c in made.choices({"most_parts": 1.0})} == {1}


def test_a_record_without_tiles_is_of_the_chosen_one(tmp_path: Path) -> None:
    row = forward_row("causal", 16384, (16, 16, 128))
    (chosen, *_) = (FwdSchedule(*s) for s in row["schedules"].values())
    del row["schedules"], row["num_sms"]
    row["ms"] = {"1": 3.0, "4": 2.0, "16": 2.5}
    path = tmp_path / "schedules.json"
    path.write_text(json.dumps({"rows": [row]}))
    (cell,) = cells_of(path)
    assert cell.ms == {chosen._replace(heads=int(n)): ms for n, ms in row["ms"].items()}
    assert chosen.heads == 8 and not cell.has_choice()
    assert cell.chosen({}).heads in (4, 16), "the nearest that was timed"


def test_a_replay_chooses_among_what_was_timed() -> None:
    row = row_of("causal", 4096, (64, 8, 128), False)
    del row["ms"][next(iter(row["ms"]))]
    cell = cell_of(row)
    assert not cell.has_choice()
    assert cell.chosen({}) in cell.ms


def test_a_record_without_turns_can_be_read(tmp_path: Path) -> None:
    row = row_of("packed_causal", 16384, (64, 8, 128), False)
    del row["schedules"], row["num_sms"]
    row["ms"] = {"1/1": 4.0, "2/2": 2.2, "2/4": 2.0}
    path = tmp_path / "schedules.json"
    path.write_text(json.dumps({"rows": [row, row | {"direction": "fwd"}]}))
    (cell,) = cells_of(path)
    assert cell.ms == {Schedule(1, 1): 4.0, Schedule(2, 4): 2.2, Schedule(2, 8): 2.0}
    assert cell.loss({}) == cell.ms[cell.chosen({})] / 2.0 - 1


def test_the_loss_of_cells_is_summed_up() -> None:
    found = fit_schedule.summary([0.0] * 90 + [0.1] * 9 + [0.5])
    assert found == pytest.approx((0.014, 0.1, 0.5))


@pytest.mark.parametrize("present", [{}, {"heads_penalty": 0.2}])
def test_a_search_finds_other_costs_only_where_they_lose_less(present: Costs) -> None:
    rows = [row_of("packed_causal", n, (64, 8, 128), False) for n in (4096, 8192, 16384)]
    cells = [cell_with(present, row) for row in rows]
    before = fit_schedule.summary(fit_schedule.losses(cells, {})).mean
    found = fit_schedule.searched(cells)
    after = fit_schedule.summary(fit_schedule.losses(cells, found)).mean
    assert after < before if present else after <= before < 0.005


def test_a_search_finds_the_step_of_a_kernel() -> None:
    rows = [forward_row(mask, 4096, (64, 8, 128)) for mask in ("causal", "packed_causal")]
    cells = [cell_with({"step_128_128_128": 0.5}, row) for row in rows]
    assert min(fit_schedule.losses(cells, {})) > 0.1
    found = fit_schedule.searched(cells)
    assert found["step_128_128_128"] < 0.6
    assert max(fit_schedule.losses(cells, found)) < 0.02


def test_only_a_tolerance_is_scaled_by_what_it_is_above_one() -> None:
    assert fit_schedule.scaled("wide_tolerance", 1.015, 2.0) == pytest.approx(1.03)
    assert fit_schedule.scaled("step_192_128_128", 1.05, 2.0) == pytest.approx(2.1)


@pytest.mark.parametrize("choice", [fit_schedule.FORWARD, fit_schedule.BACKWARD])
def test_every_cost_is_asked_for_or_has_a_reason(choice: fit_schedule.Choice) -> None:
    asked = {*choice.neutral, *choice.others}
    assert set(choice.present()) >= asked
    rest = set(choice.present()) - asked
    ends = ("_bytes", "_heads", "_spread")
    assert all(name.startswith("step_") or name.endswith(ends) for name in rest)


def test_a_cost_that_is_none_is_refused() -> None:
    cell = cell_of(row_of("full", 2048, (8, 8, 128), False))
    with pytest.raises(ValueError, match="costs must be fields of BwdCosts, got no_such_cost"):
        cell.chosen({"no_such_cost": 1.0})
    cell = forward_cell(forward_row("full", 2048, (8, 8, 128)))
    with pytest.raises(ValueError, match="costs must be fields of FwdCosts, got heads_penalty"):
        cell.chosen({"heads_penalty": 1.0})


def test_the_choices_lose_little_in_the_committed_sweeps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    forwards, backwards = fit_schedule.sweeps(fit_schedule.committed())
    assert len(forwards) >= 99 and len(backwards) >= 40
    mean, _, worst = fit_schedule.summary(fit_schedule.losses(forwards, {}))
    assert mean < 0.008 and worst < 0.06
    mean, _, worst = fit_schedule.summary(fit_schedule.losses(backwards, {}))
    assert mean < 0.014 and worst < 0.08
    for cells in (forwards, backwards):
        fit_schedule.print_sweep(cells)
    least = min(fit_schedule.committed(), key=lambda path: path.stat().st_size)
    fit_schedule.main([str(least)])
    out = capsys.readouterr().out
    assert f"FwdCosts, {len(forwards)} cells" in out and f"BwdCosts, {len(backwards)} cells" in out
