"""Cells of a sweep of schedules, in which the choice can be made again."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kernel.schedules import FwdSchedule, Schedule
from benchmarks.lib.masks import MASKS, random_blocks
from benchmarks.lib.record import record_of
from megatron_magi.core.native import solver

Costs = dict[str, float]
"""Fields of BwdCosts or FwdCosts (csrc/schedule/*_costs.h) that differ from the present ones."""

Alternatives = solver.FwdAlternatives | solver.BwdAlternatives
AnySchedule = FwdSchedule | Schedule

KEYS = {"direction", "mask", "seqlen", "heads", "widths", "ms"}
"""What a row that names its launch has."""
NUM_SMS = 132
"""Of an H100 or H200, for records that do not name them."""
PLAIN = re.compile(r"(\d+)/(\d+)")
BLOCKS = re.compile(r"bwd blocks (\d+) (\d+) ([\d.]+) (\d+)/(\d+)")
"""Tokens, block, density, query heads and key heads of random block masks."""
TILES = {(8, 192, 80, 1): "is", (8, 128, 128, 1): "8:is"}
"""What the record of two forward tiles calls them."""


@dataclass(frozen=True)
class Cell:
    """A launch, and what it took with several schedules."""

    name: str
    alternatives: Alternatives
    ms: Mapping[Any, float]
    """By schedule."""

    def compared(self, costs: Costs) -> tuple[float, dict[AnySchedule, float]]:
        """The tolerance of the choice, and by estimate the time of every schedule that was timed,
        over that of the fastest, in the order of preference."""
        tolerance, times = estimates(self.alternatives, costs)
        near = {self.timed_for(schedule): t for schedule, t in times.items()}
        known = {schedule: t for schedule, t in near.items() if schedule in self.ms}
        least = min(known.values())
        return tolerance, {schedule: t / least for schedule, t in known.items()}

    def timed_for(self, schedule: AnySchedule) -> AnySchedule:
        """The forward of the same tile that was timed with the nearest number of heads."""
        if isinstance(schedule, Schedule):
            return schedule
        near = [s for s in self.ms if s[:4] == schedule[:4]]
        return min(near, key=lambda s: abs(math.log(s.heads / schedule.heads)), default=schedule)

    def chosen(self, costs: Costs) -> AnySchedule:
        """The first schedule within the tolerance of the best of those that were timed."""
        return first_of(*self.compared(costs))

    def loss(self, costs: Costs) -> float:
        return self.ms[self.chosen(costs)] / min(self.ms.values()) - 1

    def has_choice(self) -> bool:
        """Whether the schedule that would run now is one of those that were timed."""
        return first_of(*estimates(self.alternatives, {})) in self.ms


def first_of(tolerance: float, times: dict[AnySchedule, float]) -> AnySchedule:
    most = tolerance * min(times.values())
    return next(schedule for schedule, t in times.items() if t <= most)


def estimates(made: Alternatives, costs: Costs) -> tuple[float, dict[AnySchedule, float]]:
    """The tolerance of the choice, and the time of every schedule in the order of preference."""
    if isinstance(made, solver.FwdAlternatives):
        return 1.0, {FwdSchedule.of(choice): choice.cost for choice in made.choices(costs)}
    tolerance, rows = made.timed(costs)
    return tolerance, {Schedule(*row[:5]): row[5] for row in rows}


def cells_of(path: Path) -> list[Cell]:
    """The cells of a record that were timed with two schedules or more."""
    record = record_of(path, "benchmarks.kernel.schedules")
    rows = [row for row in record["rows"] if row.keys() >= KEYS and isinstance(row["ms"], dict)]
    made = [(forward_cell if row["direction"] == "fwd" else cell_of)(row) for row in rows]
    tagged = [(BLOCKS.fullmatch(row["tag"]), row["ms"]) for row in record.get("schedules", [])]
    made += [cell_of_blocks(tag, ms) for tag, ms in tagged if tag]
    tiles = [row for row in record.get("variants", []) if {*TILES.values()} <= {*row["ms"]}]
    made += [cell_of_tiles(row["tag"], row["ms"]) for row in tiles]
    return [cell for cell in made if len(cell.ms) > 1]


def forward_cell(row: dict[str, Any]) -> Cell:
    """A row of benchmarks.kernel.schedules. One without ``schedules`` has numbers of heads at a
    time of the tile that was chosen; the present choice stands for it."""
    n, heads = row["seqlen"], (*row["heads"], row["widths"][0])
    sms = row.get("num_sms", NUM_SMS)
    made = solver.FwdAlternatives(MASKS[row["mask"]](n).slices, (n, n), heads, sms)
    named = {name: FwdSchedule(*s) for name, s in row.get("schedules", {}).items()}
    if not named:
        now = first_of(*estimates(made, {}))
        named = {name: now._replace(heads=int(name)) for name in row["ms"] if name.isdigit()}
    name = f"fwd {row['mask']} {n} {heads}"
    return Cell(name, made, {named[s]: ms for s, ms in row["ms"].items() if s in named})


def cell_of_tiles(tag: str, named: dict[str, float]) -> Cell:
    """A row of the record of two tiles of head_dim 128, of which "is" is the kernel that runs. All
    query heads were packed, and as many heads walked at a time as would be now."""
    _, mask, n = tag.split()
    lengths = int(n), int(n)
    made = solver.FwdAlternatives(MASKS[mask](int(n)).slices, lengths, (64, 8, 128), NUM_SMS)
    ms = {}
    for choice in made.choices({}):
        schedule = FwdSchedule.of(choice)
        if schedule[:4] in TILES:
            ms[schedule] = named[TILES[schedule[:4]]]
    return Cell(tag, made, ms)


def cell_of(row: dict[str, Any]) -> Cell:
    """The same of a backward. One without ``schedules`` has names of splits / key heads at a time,
    and parts took no turns."""
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
