"""What the costs behind a schedule are worth, by sweeps of the schedules that run.

    python -m tools.fit_schedule                 # loss, and without each constant
    python -m tools.fit_schedule --search        # values that lose least, as lines of the struct
    python -m tools.fit_schedule my_sweep.json   # another record of benchmarks.kernel.schedules

The choices of `csrc/schedule/forward_choice.cpp` and `backward_schedule.cpp` are made again in
every cell of the records, with other values of `FwdCosts` and `BwdCosts`, among the schedules that
were timed. The loss of a cell is the time of the chosen schedule over the least time in it, less
one. Needs no GPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError
from megatron_magi.core.native import solver
from tools.schedule_cells import Cell, Costs, cells_of

RECORDS = Path(__file__).parent.parent / "benchmarks" / "records"
INF = math.inf


class Choice(NamedTuple):
    """What is fitted."""

    struct: str
    present: Callable[[], Costs]
    neutral: dict[str, float | str]
    """The value with which a constant has no effect, or the constant that would do for it.
    Thresholds go with their penalty, and a kernel's step has none."""
    others: dict[str, str]
    """Those that no sweep of schedules can tell anything about."""
    factors: tuple[float, ...]
    """Of a constant, that the search tries."""


FORWARD = Choice(
    "FwdCosts",
    solver.fwd_costs,
    {
        "tile_cost": 0.0,
        "masked_cost": 0.0,
        "merge_cost": 0.0,
        "few_items": 0.0,
        "least_steps": 0.0,
        "section_bytes": INF,
    },
    {
        "most_parts": "bounds memory",
        "end_tile_cost": "belongs to the list",
        "end_masked_cost": "belongs to the list",
    },
    (0.25, 0.5, 0.7, 0.85, 0.95, 0.98, 1.02, 1.05, 1.2, 1.4, 2.0, 4.0),
)
BACKWARD = Choice(
    "BwdCosts",
    solver.bwd_costs,
    {
        "block_overhead": 0.0,
        "split_overhead": 0.0,
        "tolerance": 1.0,
        "heads_penalty": 0.0,
        "drift_penalty": 0.0,
        "lane_drift_bytes": "drift_bytes",
        "speed_penalty": 0.0,
        "shared_bytes": INF,
        "even_penalty": 0.0,
        "cache_penalty": 0.0,
        "grouped_penalty": 0.0,
        "wide_penalties": 1.0,
        "scattered_penalty": 0.0,
        "scattered_lanes_penalty": 0.0,
        "fewest_lanes": 1.0,
        "lanes_penalty": 0.0,
        "splits_penalty": 0.0,
        "lane_row_penalty": 0.0,
        "lag": 0.0,
        "wide_row_bytes": INF,
        "wide_tolerance": 1.0,
        "wide_lag": "lag",
        "max_whole_blocks_per_sm": INF,
        "steps_for_turn": 0.0,
        "most_split_heads": 0.0,
    },
    {
        "tile_overhead": "belongs to the list",
        "most_overlap": "belongs to the list",
        "uneven_ratio": "belongs to the list",
        "uneven_share": "belongs to the list",
        "fewest_changes": "belongs to the list",
        "even_slack": "saves the host time",
        "max_split_blocks_per_sm": "bounds memory",
        "max_scattered_blocks_per_sm": "bounds memory",
    },
    (0.25, 0.5, 0.7, 0.85, 1.2, 1.4, 2.0, 4.0),
)

FEWEST_CELLS = 3
"""In which a constant must have an effect, or the sweeps say nothing about it and it stays."""


class Loss(NamedTuple):
    mean: float
    p95: float
    worst: float

    def __str__(self) -> str:
        return " ".join(f"{name} {100 * x:5.2f} %" for name, x in self._asdict().items())


def choice_of(cells: Sequence[Cell]) -> Choice:
    """What runs the launches of these cells, which are all forwards or all backwards."""
    is_forward = isinstance(cells[0].alternatives, solver.FwdAlternatives)
    return FORWARD if is_forward else BACKWARD


def losses(cells: Sequence[Cell], costs: Costs) -> list[float]:
    """Of every cell."""
    return [cell.loss(costs) for cell in cells]


def summary(found: Sequence[float]) -> Loss:
    ordered = sorted(found)
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return Loss(sum(found) / len(found), p95, ordered[-1])


def without(choice: Choice, name: str, costs: Costs) -> Costs:
    """The costs with a neutral value of this one."""
    value = choice.neutral[name]
    present = choice.present() | costs
    return costs | {name: present[value] if isinstance(value, str) else value}


def reached(cells: Sequence[Cell], name: str, costs: Costs) -> int:
    """In how many cells the constant changes what schedules are compared by."""
    other = without(choice_of(cells), name, costs)
    return sum(cell.compared(costs) != cell.compared(other) for cell in cells)


class Ablation(NamedTuple):
    """What happens if a constant is neutral."""

    name: str
    reached: int
    """Cells in which it has any effect on what is compared."""
    moved: int
    """Cells in which another schedule is chosen."""
    loss: Loss
    mean_more: float
    """Over the loss with the constant, the mean."""
    worst_more: float
    """The same in the cell that loses most by it."""

    def exercised(self) -> bool:
        return self.reached >= FEWEST_CELLS

    def __str__(self) -> str:
        counts = f"reaches {self.reached:2d}, moves {self.moved:2d}"
        more = f"more: mean {100 * self.mean_more:+.2f} % worst {100 * self.worst_more:+.2f} %"
        return f"  {self.name:28s} {counts}; {self.loss}; {more}"


def ablation(cells: Sequence[Cell], name: str, costs: Costs, base: Sequence[float]) -> Ablation:
    """Beside the cells' losses with the constants that are there."""
    other = without(choice_of(cells), name, costs)
    found = losses(cells, other)
    more = [x - y for x, y in zip(found, base, strict=True)]
    moved = sum(cell.chosen(costs) != cell.chosen(other) for cell in cells)
    counts = reached(cells, name, costs), moved
    return Ablation(name, *counts, summary(found), sum(more) / len(more), max(more))


def scaled(name: str, value: float, factor: float) -> float:
    """A tolerance by what it is above one."""
    return 1 + (value - 1) * factor if name.endswith("tolerance") else value * factor


def searched(cells: Sequence[Cell]) -> Costs:
    """Values that lose less, one constant after another; as they are where none does."""
    choice, costs = choice_of(cells), Costs()
    best = summary(losses(cells, costs)).mean
    for name, value in choice.present().items():
        for factor in () if name in choice.others else choice.factors:
            other = costs | {name: scaled(name, value, factor)}
            mean = summary(losses(cells, other)).mean
            if mean < best - 1e-6:
                best, costs = mean, other
    return costs


def print_ablation(cells: Sequence[Cell]) -> None:
    choice, base = choice_of(cells), losses(cells, {})
    rows = [ablation(cells, name, {}, base) for name in choice.neutral]
    print("without a constant:")
    for row in sorted(rows, key=lambda a: -a.mean_more):
        if row.exercised():
            print(row)
    unknown = [f"{row.name} ({row.reached})" for row in rows if not row.exercised()]
    print("not exercised (cells that it reaches):", ", ".join(unknown))
    print("not asked:", ", ".join(f"{name} ({why})" for name, why in choice.others.items()))


def print_searched(cells: Sequence[Cell]) -> None:
    costs = searched(cells)
    for name, value in (choice_of(cells).present() | costs).items():
        print(f"  double {name} = {value:g};{'  // other than now' * (name in costs)}")
    print(summary(losses(cells, costs)))


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="*", type=Path, help="default: all that are committed")
    parser.add_argument("--search", action="store_true")
    return parser.parse_args(argv)


def committed() -> list[Path]:
    """Records that have times of several schedules."""
    names = "schedules_*.json", "block_sparse_*24.json", "fwd_head_dim_128_*.json"
    return sorted(path for name in names for path in RECORDS.glob(name))


def sweeps(paths: Iterable[Path]) -> list[list[Cell]]:
    """The forwards of the records, and the backwards, if there are any."""
    cells = [cell for path in paths for cell in cells_of(path)]
    split = [[cell for cell in cells if choice_of([cell]) is c] for c in (FORWARD, BACKWARD)]
    return [sweep for sweep in split if sweep]


def print_sweep(cells: Sequence[Cell]) -> None:
    found = losses(cells, {})
    worst = cells[found.index(max(found))].name
    print(f"{choice_of(cells).struct}, {len(cells)} cells: {summary(found)} ({worst})")
    unseen = [cell.name for cell in cells if not cell.has_choice()]
    print(f"in {len(unseen)} of them the schedule that would run was not timed")


def main(argv: list[str] | None = None) -> None:
    args = options(argv)
    found = sweeps(args.records or committed())
    if not found:
        raise UsageError("a record of benchmarks.kernel.schedules is needed, with times of several "
                         f"schedules, got {', '.join(map(str, args.records))} without; name "
                         f"another")  # fmt: skip
    for cells in found:
        print_sweep(cells)
        (print_searched if args.search else print_ablation)(cells)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
