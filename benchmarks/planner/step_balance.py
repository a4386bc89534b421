"""How long replicas and pipeline stages wait for packs of unequal attention; writes a dated record.

    python -m benchmarks.planner.step_balance [--steps 64] [--out benchmarks/records/....json]
    python -m benchmarks.planner.step_balance --table benchmarks/records/....json   # as Markdown

No GPU is needed: times are those of the cost model that a run with data.balance_steps orders its
samples by (training/estimate/pack_cost.py). Packs of 131,072 tokens hold documents of three length
distributions. A step takes as long as its slowest replica; a replica with pipeline stages takes as
long as Megatron's 1F1B schedule does if every stage has the same share of a microbatch and messages
take no time. "over_equal" is the time of all steps over what it would be if all packs of a step
were equal; "sampler" is the order without data.balance_steps, and a number its value. "step_spread"
is the standard deviation of the steps' costs over their mean, and "moved_steps" how many steps a
pack is trained earlier or later, on average.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.options import at_least
from benchmarks.lib.record import record_of
from benchmarks.planner.plans import DISTRIBUTIONS, Setting, meta, packs
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.training.data.step_order import StepShape, plan_steps
from megatron_magi.training.estimate.pack_cost import pack_cost
from megatron_magi.training.recipe.recipe import load_recipe
from megatron_magi.training.recipe.run_config import RunConfig

RECIPE = "llama3_8b_64k_8gpu"
OVERRIDES = ("data.seq_length=131072", "train.recompute=none")
TOKENS = Setting("", False, 16, 8192)
"""Packs of 16 times 8,192 tokens, documents uncut."""
KEYS = ("distribution", "dp", "pp", "microbatches", "over_equal")
"""What the table reads of every row."""
GROUPS = (None, 1, 4, 16)
"""Values of data.balance_steps; None is the sampler's order."""

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    dp: int
    pp: int
    microbatches: int

    def __str__(self) -> str:
        plural = "es" if self.microbatches > 1 else ""
        return f"DP {self.dp}, PP {self.pp}, {self.microbatches} microbatch{plural}"


LAYOUTS = (
    Layout(2, 1, 4), Layout(8, 1, 1), Layout(8, 1, 4), Layout(8, 1, 16),
    Layout(1, 2, 8), Layout(8, 2, 8),
)  # fmt: skip


def pipeline_ns(times: Times, pp: int) -> float:
    """Time of one replica's microbatches, int64 [n, 2] (forward, backward), under 1F1B."""
    if pp == 1:
        return float(times.sum())
    forward, backward = times.T / pp
    ends: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * pp
    todo = [list(one_f_one_b(len(times), pp - stage - 1)) for stage in range(pp)]
    while any(todo):
        for stage, calls in enumerate(todo):
            while calls and (ready := _ready_at(*calls[0], stage, pp, ends)) is not None:
                kind, number = calls.pop(0)
                took = forward[number] if kind == "forward" else backward[number]
                clocks[stage] = ends[kind, number, stage] = max(clocks[stage], ready) + took
    return max(clocks)


def one_f_one_b(count: int, warm_up: int) -> Iterator[tuple[str, int]]:
    """A pipeline stage's calls: ``warm_up`` forwards, pairs of forward and backward, the rest."""
    warm_up = min(warm_up, count)
    for number in range(count + warm_up):
        if number < count:
            yield "forward", number
        if number >= warm_up:
            yield "backward", number - warm_up


def _ready_at(
    kind: str, number: int, stage: int, pp: int, ends: dict[tuple[str, int, int], float]
) -> float | None:
    """When a call's input is there; None while nobody has made it."""
    if kind == "forward":
        return ends.get((kind, number, stage - 1)) if stage else 0.0
    last = stage == pp - 1
    return ends.get(("forward", number, stage)) if last else ends.get((kind, number, stage + 1))


def equal_ns(times: Times, layout: Layout) -> float:
    """Time of a step, int64 [batch, 2], if all its packs took the mean."""
    own = times.sum() / layout.dp / layout.pp
    return float(own * (1 + (layout.pp - 1) / layout.microbatches))


def measure(times: Times, layout: Layout, balance_steps: int | None) -> dict[str, Any]:
    """One row: all of ``times``, int64 [packs, 2], in groups of steps."""
    shape = StepShape(balance_steps or 1, layout.microbatches, layout.dp, layout.pp > 1)
    took = equal = 0.0
    seconds, moved, steps = [], [], []
    for group in times.reshape(-1, shape.num_steps * shape.batch, 2):
        began = time.perf_counter()
        order = _order(group.sum(axis=1), shape, balance_steps)
        seconds.append(time.perf_counter() - began)
        moved.append(np.abs(order // shape.batch - np.arange(shape.num_steps)[:, None, None]))
        for step in group[order]:  # [microbatch, replica, 2]
            took += max(pipeline_ns(step[:, rank], layout.pp) for rank in range(layout.dp))
            equal += equal_ns(step, layout)
            steps.append(int(step.sum()))
    return {
        **asdict(layout), "balance_steps": balance_steps, "over_equal": round(took / equal, 4),
        "step_spread": round(float(np.std(steps) / np.mean(steps)), 4),
        "moved_steps": round(float(np.mean(moved)), 3),
        "order_ms": round(1e3 * float(np.median(seconds)), 3),
    }  # fmt: skip


def _order(costs: Times, shape: StepShape, balance_steps: int | None) -> Times:
    """int64 [num_steps, num_microbatches, dp_size]: indices into ``costs``."""
    if balance_steps is None:
        return np.arange(len(costs)).reshape(shape.num_steps, shape.num_microbatches, -1)
    return plan_steps(costs, shape)


def costs_of(name: str, count: int, config: RunConfig) -> tuple[Times, float]:
    """int64 [count, 2], forward and backward of sampled packs, and ms for each to find them."""
    masks = list(packs(Setting(name, TOKENS.cut, TOKENS.cp_size, TOKENS.tokens_per_rank), count))
    began = time.perf_counter()
    found = [pack_cost(mask, config) for mask in masks]
    each = (time.perf_counter() - began) * 1e3 / count
    return np.array([(cost.forward_ns, cost.backward_ns) for cost in found]), each


def run(num_steps: int) -> list[dict[str, Any]]:
    config = load_recipe(RECIPE, OVERRIDES)
    rows = []
    most = max(layout.dp * layout.microbatches for layout in LAYOUTS)
    for name in DISTRIBUTIONS:
        times, each = costs_of(name, num_steps * most, config)
        seconds = times.sum(axis=1) / 1e9
        spread = [round(float(x), 3) for x in np.percentile(seconds, [0, 50, 90, 99, 100])]
        of_packs = {"distribution": name, "pack_s": spread, "cost_ms": round(each, 3)}
        for layout in LAYOUTS:
            used = times[: num_steps * layout.dp * layout.microbatches]
            for balance_steps in GROUPS:
                rows.append(of_packs | measure(used, layout, balance_steps))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def table(record: dict[str, Any]) -> str:
    """One line for each distribution and layout; a cell for each order."""
    names = ["sampler" if size is None else str(size) for size in GROUPS]
    lines = [["documents", "layout", *names], ["---"] * (2 + len(names))]
    cells: dict[tuple[str, str], list[str]] = {}
    for row in record["rows"]:
        layout = str(Layout(row["dp"], row["pp"], row["microbatches"]))
        cells.setdefault((row["distribution"], layout), []).append(f"{row['over_equal']:.3f}")
    lines += [[*head, *of] for head, of in cells.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    most = max(size for size in GROUPS if size is not None)
    parser.add_argument("--steps", type=at_least(most, most), default=64,
                        help=f"of every layout, a multiple of {most}")  # fmt: skip
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument("--table", type=Path, help="print a record as Markdown and stop")
    given = parser.parse_args(argv)
    if given.table:
        print(table(record_of(given.table, "benchmarks.planner.step_balance", KEYS)))
        return 0
    rows = run(given.steps)
    if given.out:
        of_run = {"recipe": RECIPE, "overrides": list(OVERRIDES), "steps": given.steps}
        units = {"units": "pack_s: seconds of one GPU, percentiles 0, 50, 90, 99, 100"}
        record = {"meta": meta() | of_run | units, "rows": rows}
        given.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
