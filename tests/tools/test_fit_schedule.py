"""The costs are fitted by the choice that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernel.schedules import Schedule, compared
from benchmarks.lib.masks import MASKS
from megatron_magi.core.kernel.hopper.launch_values import HeadsKey
from megatron_magi.core.native import solver
from tools import fit_schedule
from tools.schedule_cells import Cell, Costs, cell_of, cells_of

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
    return {
        "direction": "deterministic" if deterministic else "bwd", "heads": list(heads[:2]),
        "widths": [heads[2], heads[2]], "mask": mask, "seqlen": seqlen, "num_sms": 132,
        "ms": {s.name(): 1.0 + i for i, s in enumerate(schedules)},
        "schedules": {s.name(): list(s) for s in schedules},
    }  # fmt: skip


def cell_with(costs: Costs, row: Any) -> Cell:
    """The cell, if the schedules took what they would with these costs."""
    cell = cell_of(row)
    return Cell(cell.name, cell.alternatives, cell.compared(costs)[1])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("mask", "seqlen", "heads"), CASES)
def test_a_replay_chooses_what_runs(
    mask: str, seqlen: int, heads: tuple[int, int, int], deterministic: bool
) -> None:
    cell = cell_of(row_of(mask, seqlen, heads, deterministic))
    made = solver.bwd_work_list(
        MASKS[mask](seqlen).slices, seqlen, seqlen, *heads, 132, deterministic=deterministic
    )
    runs = made.num_splits, made.lanes_per_section, made.in_turns, made.whole_heads, made.band_rows
    assert cell.chosen({}) == runs
    assert cell.has_choice()
    assert cell.loss({}) == 0  # the sweep names the chosen one first, and it has the least ms


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


def test_what_costs_nothing_may_go_and_what_is_not_reached_stays() -> None:
    rows = [row_of("full", n, (64, 8, 128), False) for n in (2048, 4096, 8192, 16384)]
    cells = [cell_with({"heads_penalty": 0.0}, row) for row in rows]
    gone = [row.name for row in fit_schedule.eliminated(cells)]
    assert "heads_penalty" in gone
    assert not {"scattered_penalty", "lag", "wide_lag"} & set(gone)


def test_every_cost_is_asked_for_or_has_a_reason() -> None:
    asked = {*fit_schedule.NEUTRAL, *fit_schedule.OTHERS}
    assert set(solver.bwd_costs()) >= asked
    thresholds = set(solver.bwd_costs()) - asked
    assert all(name.endswith(("_bytes", "_heads", "_spread")) for name in thresholds)


def test_a_cost_that_is_none_is_refused() -> None:
    cell = cell_of(row_of("full", 2048, (8, 8, 128), False))
    with pytest.raises(ValueError, match="costs must be fields of BwdCosts, got no_such_cost"):
        cell.chosen({"no_such_cost": 1.0})


def test_the_choice_loses_little_in_the_committed_sweeps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cells = [cell for path in fit_schedule.committed() for cell in cells_of(path)]
    assert len(cells) >= 40
    mean, _, worst = fit_schedule.summary(fit_schedule.losses(cells, {}))
    assert mean < 0.014 and worst < 0.08
    fit_schedule.main([])
    assert f"{len(cells)} cells" in capsys.readouterr().out
