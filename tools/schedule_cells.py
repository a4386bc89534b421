"""Cells of a sweep of backward schedules, in which the choice can be made again."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernel.schedules import Schedule
from benchmarks.lib.masks import MASKS
from megatron_magi import AttnMask, masks
from megatron_magi.core.native import solver

Costs = dict[str, float]
"""Fields of BwdCosts (csrc/schedule/backward_costs.h) that differ from the present ones."""

NUM_SMS = 132
"""Of an H100 or H200, for records that do not name them."""
PLAIN = re.compile(r"(\d+)/(\d+)")
BLOCKS = re.compile(r"bwd blocks (\d+) (\d+) ([\d.]+) (\d+)/(\d+)")
"""Tokens, block, density, query heads and key heads of random block masks."""


@dataclass(frozen=True)
class Cell:
    """A launch, and what it took with several schedules."""

    name: str
    alternatives: solver.BwdAlternatives
    ms: dict[Schedule, float]

    def compared(self, costs: Costs) -> tuple[float, dict[Schedule, float]]:
        """The tolerance of the choice, and by estimate the time of every schedule that was timed,
        over that of the fastest, in the order of preference."""
        tolerance, rows = self.alternatives.timed(costs)
        times = {Schedule(*row[:5]): row[5] for row in rows}
        known = {schedule: t for schedule, t in times.items() if schedule in self.ms}
        least = min(known.values())
        return tolerance, {schedule: t / least for schedule, t in known.items()}

    def chosen(self, costs: Costs) -> Schedule:
        """The first schedule within the tolerance of the best of those that were timed."""
        tolerance, times = self.compared(costs)
        return next(schedule for schedule, ratio in times.items() if ratio <= tolerance)

    def loss(self, costs: Costs) -> float:
        return self.ms[self.chosen(costs)] / min(self.ms.values()) - 1

    def has_choice(self) -> bool:
        """Whether the schedule that would run now is one of those that were timed."""
        tolerance, rows = self.alternatives.timed({})
        most = tolerance * min(row[5] for row in rows)
        return Schedule(*next(row[:5] for row in rows if row[5] <= most)) in self.ms


def cells_of(path: Path) -> list[Cell]:
    """The cells of a record whose backward was timed with two schedules or more."""
    record = json.loads(path.read_text())
    rows = [row for row in record["rows"] if row.get("direction") in ("bwd", "deterministic")]
    made = [cell_of(row) for row in rows if isinstance(row["ms"], dict)]
    tagged = [(BLOCKS.fullmatch(row["tag"]), row["ms"]) for row in record.get("schedules", [])]
    made += [cell_of_blocks(tag, ms) for tag, ms in tagged if tag]
    return [cell for cell in made if len(cell.ms) > 1]


def cell_of(row: dict[str, Any]) -> Cell:
    """A row of benchmarks.kernel.schedules. One without ``schedules`` has names of splits / key
    heads at a time, and parts took no turns."""
    plain = {name: PLAIN.fullmatch(name) for name in row["ms"]}
    named = {n: [int(m[1]), int(m[1]) * int(m[2])] for n, m in plain.items() if m}
    schedules = {name: Schedule(*s) for name, s in row.get("schedules", named).items()}
    n, mode = row["seqlen"], (row["direction"] == "deterministic", "schedules" in row)
    heads = *row["heads"], row["widths"][0]
    sms = row.get("num_sms", NUM_SMS)
    made = solver.BwdAlternatives(MASKS[row["mask"]](n).slices, (n, n), heads, sms, *mode)
    name = f"{row['direction']} {row['mask']} {n} {heads}"
    return Cell(name, made, {schedules[s]: ms for s, ms in row["ms"].items() if s in schedules})


def cell_of_blocks(tag: re.Match[str], named: dict[str, float]) -> Cell:
    """A row of the record of random blocks, by splits / lanes at a time; * is what was chosen. Its
    masks are lost, so others of the same density stand for them."""
    n, block, heads_q, heads_kv = (int(tag[i]) for i in (1, 2, 4, 5))
    heads = heads_q, heads_kv, 128
    mask = random_blocks(n, block, float(tag[3]))
    made = solver.BwdAlternatives(mask.slices, (n, n), heads, NUM_SMS, False, False)
    plain = {PLAIN.fullmatch(name.lstrip("*")): ms for name, ms in named.items()}
    return Cell(tag[0], made, {Schedule(int(m[1]), int(m[2])): t for m, t in plain.items() if m})


def random_blocks(seqlen: int, block: int, density: float) -> AttnMask:
    count = -(-seqlen // block)
    seen = np.random.default_rng(0).random((count, count)) < density
    return masks.from_block_mask(seen, block, seqlen)
