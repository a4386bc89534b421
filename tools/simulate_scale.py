"""Modelled attention time on 8 to 512 GPUs of several nodes; writes a dated record.

    python -m tools.simulate_scale --record benchmarks/records/....json  # rates measured there
    python -m tools.simulate_scale --cp 8,64 --packs 5 --out sim.json    # packed causal documents
    python -m tools.simulate_scale --validate                            # the model at CP 2 alone

Nothing here is measured but the rates: those of the kernels come from one GPU's times in a record
of benchmarks.distributed.attn, those of the links from the cost table. The model is the planner's
own (csrc/planner/stages.h); the times that the same record has for two GPUs show how far it is off.
A plan's degree and forward mode are those with the least modelled time on the links that it uses.
"efficiency" is TFLOP/s over that of "nodes" on the fewest GPUs; longer sequences hold longer
documents, so it may exceed 1. "of kernels" is the share of the time that tiles alone would take, if
they were shared equally.

Plans that are compared: "lpt_2048" is longest-processing-time-first with chunks of 2048 rows and no
search, "flat" is ours as if all links were equal, and "nodes" is ours with rows that cross once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.masks import MASKS
from benchmarks.lib.options import at_least, list_of, new_file
from benchmarks.lib.record import describe_cpu, write_record
from benchmarks.planner.plans import DISTRIBUTIONS, HEADS, SEED, Setting, packs
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.config import CostTable, ForwardMode, MagiConfig
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.native import solver
from megatron_magi.core.plan import AttnPlan, make_attn_plan
from megatron_magi.core.plan.attn_plan import FORWARD_MODES
from megatron_magi.core.plan.stage_costs import stage_costs

RECORD = "benchmarks/records/dist_h200_2026-11-22_2gpus.json"
RATES_OF = "packed_causal"
"""The record's mask whose times give the rates."""
BACKWARD_TILES = 2.5
"""The model takes a backward tile as 5/2 forward tiles."""
PLANS = ("lpt_2048", "flat", "nodes")
COSTS = CostTable(ranks_per_node=8)


@dataclass(frozen=True)
class Rates:
    """Picoseconds of one GPU for a tile, forward and backward."""

    forward_ps: float
    backward_ps: float

    @classmethod
    def measured(cls, record: dict[str, Any], name: str) -> Rates:
        """From one GPU's times with the mask ``name``."""
        rows = {
            r["direction"]: r for r in record["rows"] if (r["mask"], r["impl"]) == (name, "one_gpu")
        }
        mask = MASKS[name](rows["fwd"]["tokens"] * rows["fwd"]["ranks"])
        tiles = int(make_attn_plan(mask, 1, HEADS, MagiConfig()).loads.sum())
        return cls(rows["fwd"]["ms"] * 1e9 / tiles, rows["bwd"]["ms"] * 1e9 / tiles)


@dataclass(frozen=True)
class Modelled:
    """A plan on links, in ms; rows are means over ranks in rows of a rank."""

    forward_ms: float
    backward_ms: float
    forward_mode: ForwardMode
    overlap_degree: int
    received_own: float
    crossing_own: float
    """Received from other nodes, as often as they cross."""
    imbalance: float


def model(plan: AttnPlan, rates: Rates, per_node: int, *, once: bool) -> Modelled:
    """The best degree and mode for the links; ``once``: a row crosses to a node once."""
    rows, crossing = link_rows(plan, per_node, once=once)
    work = plan.layout.native.rank_work(plan.mask.slices, loads=plan.loads, link_rows=rows)
    costs = stage_costs(plan.head_shape, plan.config, plan.layout.num_local_tokens)
    forward, backward = (
        with_tiles(costs, ps) for ps in (rates.forward_ps, rates.backward_ps / BACKWARD_TILES)
    )
    best: tuple[float, float, int, int] | None = None
    for degree in range(5):
        back = float(backward.backward_times(work, degree).max())
        for mode in range(len(FORWARD_MODES)):
            ahead = float(forward.forward_stages(work, degree, mode)[:, -1, 3].max())
            if best is None or ahead + back < best[0] + best[1]:
                best = ahead, back, mode, degree
    assert best is not None
    own = plan.layout.num_local_tokens
    return Modelled(
        best[0] / 1e3, best[1] / 1e3, FORWARD_MODES[best[2]], best[3],
        float(plan.rows_received.mean()) / own, crossing / own / plan.cp_size, plan.imbalance,
    )  # fmt: skip


def with_tiles(costs: solver.StageCosts, tile_ps: float) -> solver.StageCosts:
    names = ("row_ps", "grad_row_ps", "exchange_ps", "call_ps", "pass_ps", "crossing_row_ps",
             "keeps_rows")  # fmt: skip
    return solver.StageCosts(
        tile_ps=round(tile_ps), **{name: getattr(costs, name) for name in names}
    )


def link_rows(plan: AttnPlan, per_node: int, *, once: bool) -> tuple[np.ndarray, int]:
    """(rows on each rank's busiest link, as rows of the link inside a node; rows that cross).

    Both ways of exchanging are counted alike: what a rank sends and receives inside its node and
    between nodes, the latter at the rate of that link.
    """
    table, cp_size = plan.config.costs, plan.cp_size
    costs = stage_costs(plan.head_shape, plan.config, plan.layout.num_local_tokens)
    if cp_size <= per_node:
        return plan.layout.native.rows_on_link(plan.transfers, costs, cp_size), 0
    _, dst, src, start, end = plan.transfers.T
    crosses, rows = dst // per_node != src // per_node, end - start
    if once:
        legs = solver.crossing_leg(plan.transfers, per_node)
        crossing = int((legs[:, 4] - legs[:, 3]).sum())
        return plan.layout.native.rows_on_link(plan.transfers, costs, per_node), crossing
    slower = table.link_gib_s / table.node_link_gib_s
    busiest = np.zeros(cp_size, np.int64)
    for rank_of in (dst, src):
        for chosen, factor in ((~crosses, 1.0), (crosses, slower)):
            on_link = np.bincount(rank_of[chosen], rows[chosen], cp_size) * factor
            busiest = np.maximum(busiest, on_link.astype(np.int64))
    return busiest, int(rows[crosses].sum())


def plans_of(mask: AttnMask, cp_size: int) -> Iterator[tuple[str, AttnPlan, float]]:
    """(name, plan, seconds of planning)."""
    # The rates are measured times over tiles, so plans are balanced in tiles as well.
    configs = {
        "lpt_2048": MagiConfig(chunk_size=2048, costs=CostTable(swap_trials=0)),
        "flat": MagiConfig(),
        "nodes": MagiConfig(costs=COSTS),
    }
    for name in PLANS:
        began = time.perf_counter()
        plan = make_attn_plan(mask, cp_size, HEADS, configs[name])
        yield name, plan, time.perf_counter() - began


def simulate(setting: Setting, count: int, rates: Rates) -> list[dict[str, Any]]:
    """One row for each plan: medians over packs."""
    per_node = COSTS.ranks_per_node
    assert per_node is not None
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PLANS}
    for mask in packs(setting, count):
        flops = 4 * HEADS.num_heads_q * HEADS.head_dim * mask.area() / setting.cp_size
        for name, plan, seconds in plans_of(mask, setting.cp_size):
            made = model(plan, rates, per_node, once=name == "nodes")
            both = made.forward_ms + made.backward_ms
            kernels = int(plan.loads.sum()) / plan.cp_size * (rates.forward_ps + rates.backward_ps)
            found[name].append(
                asdict(made)
                | {"plan_ms": seconds * 1e3, "chunk_size": plan.layout.chunk_size}
                | {"fwd_tflops": flops / made.forward_ms / 1e9, "tflops": 3.5 * flops / both / 1e9}
                | {"of_kernels": kernels / 1e9 / both}
            )
    return [asdict(setting) | {"plan": name} | medians(rows) for name, rows in found.items()]


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {k for k, v in rows[0].items() if isinstance(v, int | float)}
    return {k: round(float(statistics.median(r[k] for r in rows)), 4) for k in sorted(numbers)}


def validate(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Modelled against measured times on two GPUs of one host, per mask and direction."""
    rows = []
    for name in dict.fromkeys(row["mask"] for row in record["rows"]):
        measured = {
            r["direction"]: r for r in record["rows"] if (r["mask"], r["impl"]) == (name, "ours")
        }
        one = measured["fwd"]
        mask = MASKS[name](one["tokens"] * one["ranks"])
        plan = make_attn_plan(mask, one["ranks"], HEADS, MagiConfig())
        made = model(plan, Rates.measured(record, name), one["ranks"], once=False)
        for direction, ms in (("fwd", made.forward_ms), ("bwd", made.backward_ms)):
            seen = measured[direction]["ms"]
            rows.append({"mask": name, "direction": direction, "modelled_ms": round(ms, 3),
                         "measured_ms": seen, "miss": round(ms / seen - 1, 4)})  # fmt: skip
    return rows


def add_efficiency(rows: list[dict[str, Any]]) -> None:
    """TFLOP/s over those of "nodes" on the fewest GPUs of the same setting."""
    first: dict[tuple[Any, ...], float] = {}
    for row in sorted(rows, key=lambda row: (row["plan"] != "nodes", row["cp_size"])):
        key = row["distribution"], row["cut"], row["tokens_per_rank"]
        row["efficiency"] = round(row["tflops"] / first.setdefault(key, row["tflops"]), 4)


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['distribution']:8s} cp {row['cp_size']:4d} {row['tokens_per_rank']:6d} "
        f"{row['plan']:9s} fwd {row['forward_ms']:8.3f} bwd {row['backward_ms']:8.3f} ms  "
        f"{row['tflops']:4.0f} TFLOP/s  efficiency {row['efficiency']:5.3f}  "
        f"of kernels {row['of_kernels']:5.3f}  "
        f"received {row['received_own']:6.2f} crossing {row['crossing_own']:6.2f} own  "
        f"plan {row['plan_ms']:7.0f} ms", flush=True,
    )  # fmt: skip


def options(argv: list[str] | None = None) -> argparse.Namespace:
    numbers = list_of(at_least(1))
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, default=Path(RECORD), help="measured rates")
    parser.add_argument("--distributions", default="magi", help=", ".join(DISTRIBUTIONS))
    parser.add_argument("--cp", type=numbers, default=[8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--tokens", type=numbers, default=[8192], help="of a rank")
    parser.add_argument(
        "--packs", type=at_least(1), default=5, help="sampled sequences per setting"
    )
    parser.add_argument("--validate", action="store_true", help="compare with the record, no more")
    parser.add_argument("--out", type=new_file, help="record to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    given = options(argv)
    record = json.loads(given.record.read_text())
    checked = validate(record)
    for row in checked:
        print(f"CP 2 {row['mask']:20s} {row['direction']}: modelled {row['modelled_ms']:7.3f} ms, "
              f"measured {row['measured_ms']:7.3f}, miss {row['miss']:+.1%}")  # fmt: skip
    if given.validate:
        return 0
    rates = Rates.measured(record, RATES_OF)
    rows: list[dict[str, Any]] = []
    for name in given.distributions.split(","):
        for tokens in given.tokens:
            for cp_size in given.cp:
                setting = Setting(name, False, cp_size, tokens)
                rows += simulate(setting, given.packs, rates)
    add_efficiency(rows)
    for row in rows:
        show(row)
    if given.out:
        of_run = {"record": str(given.record), "rates": asdict(rates), "costs": asdict(COSTS),
                  "packs": given.packs, "rates_of": RATES_OF, "seed": SEED, "heads": asdict(HEADS),
                 }  # fmt: skip
        write_record(given.out, describe_cpu() | of_run, rows, validation=checked)
        print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
