"""Time to plan, balance and rows received on packed documents; writes a dated record.

    python -m benchmarks.planner.plans [--packs 20] [--out benchmarks/records/....json]

Every number is one core's. "own" is the number of rows of a rank: received 0.5 own means that a
rank of 8192 rows receives 4096 rows, mean over ranks and packs. Documents are causal and packed
until the sequence is full; "cut" cuts them at a quarter of the sequence first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.lib.options import at_least, new_file
from benchmarks.lib.record import describe_cpu, write_record
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.config import CostTable, MagiConfig
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.plan import AttnPlan, HeadShape, make_attn_plan
from megatron_magi.core.plan.token_layout import choose_token_layout
from megatron_magi.masks import from_cu_seqlens

HEADS = HeadShape(64, 8, 128)
SEED = 42
FINE = 512

# Share of documents (percent) per bin of lengths; lengths are uniform inside a bin.
DISTRIBUTIONS: dict[str, tuple[list[int], list[float]]] = {
    "magi": (  # the histogram published with MagiAttention's benchmark, 13.46 M documents
        [1, 11, 51, 101, 201, 501, 1025, 2049, 4097, 8193, 16385, 32769, 65537, 131073, 196609],
        [0.22, 2.91, 5.2, 10.23, 28.19, 24.64, 15.65, 7.34, 3.05, 1.29, 0.85, 0.14, 0.17, 0.14],
    ),
    "wlb": (  # shaped like WLB-LLM's lengths as rebuilt by DistCA: short body, heavy tail
        [1, 101, 501, 1025, 2049, 4097, 6301, 8193, 16385, 32769, 65537, 125000],
        [1.6, 6.2, 8.2, 15.8, 31.9, 32.9, 1.0, 1.0, 0.45, 0.36, 0.53],
    ),
    "prolong": (  # shaped like ProLong's: nothing below 641 tokens, thin tail
        [641, 1025, 2049, 4097, 8193, 16385, 32769, 65537, 131073, 340001],
        [15.0, 38.4, 26.9, 14.4, 4.3, 0.78, 0.15, 0.04, 0.02],
    ),
}


@dataclass(frozen=True)
class Setting:
    """One cell of the table."""

    distribution: str
    cut: bool
    cp_size: int
    tokens_per_rank: int

    def __str__(self) -> str:
        cut = "cut" if self.cut else "uncut"
        return f"{self.distribution} {cut} cp{self.cp_size} {self.tokens_per_rank // 1024}K"


def sample_lengths(name: str, total: int, cut: bool, rng: np.random.Generator) -> list[int]:
    """Document lengths that fill `total` tokens exactly; the last document is shortened."""
    edges, percent = DISTRIBUTIONS[name]
    share = np.array(percent) / sum(percent)
    longest = total // 4 if cut else total
    lengths: list[int] = []
    room = total
    while room:
        i = rng.choice(len(share), p=share)
        left = int(min(rng.integers(edges[i], edges[i + 1]), room))
        room -= left
        while left:
            lengths.append(min(left, longest))
            left -= lengths[-1]
    return lengths


def packed_causal(lengths: list[int]) -> AttnMask:
    return from_cu_seqlens(np.cumsum([0, *lengths]))


def packs(setting: Setting, count: int) -> Iterator[AttnMask]:
    rng = np.random.default_rng(SEED)
    for _ in range(count):
        total = setting.cp_size * setting.tokens_per_rank
        yield packed_causal(sample_lengths(setting.distribution, total, setting.cut, rng))


def timed(make: Callable[[], Any], repeats: int = 1) -> tuple[Any, float]:
    """The last result and the median time in ms."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = make()
        times.append((time.perf_counter() - began) * 1e3)
    return result, statistics.median(times)


def summarise(plans: list[AttnPlan], times_ms: list[float]) -> dict[str, Any]:
    rows = [plan.rows_received for plan in plans]
    own = plans[0].layout.num_local_tokens
    return {
        "chunk_size": sorted({plan.layout.chunk_size for plan in plans}),
        "imbalance_mean": round(statistics.fmean(p.imbalance for p in plans), 4),
        "imbalance_max": round(max(p.imbalance for p in plans), 4),
        "received_own": round(statistics.fmean(float(r.mean()) for r in rows) / own, 4),
        "received_own_max_rank": round(statistics.fmean(float(r.max()) for r in rows) / own, 4),
        "transfers": round(statistics.fmean(len(p.transfers) for p in plans)),
        "plan_ms_p50": round(statistics.median(times_ms), 3),
        "plan_ms_max": round(max(times_ms), 3),
    }


def measure_quality(setting: Setting, count: int) -> dict[str, Any]:
    """LPT with large and fine chunks, the swap search with fine chunks and with its own choice."""
    configs = {
        "lpt_2048": MagiConfig(chunk_size=2048, costs=CostTable(swap_trials=0)),
        "lpt_fine": MagiConfig(chunk_size=FINE, costs=CostTable(swap_trials=0)),
        "swap_fine": MagiConfig(chunk_size=FINE),
        "swap_auto": MagiConfig(),
    }
    masks = list(packs(setting, count))
    row: dict[str, Any] = {"what": "quality", **asdict(setting), "packs": count, "fine": FINE}
    for name, config in configs.items():
        made = [
            timed(lambda m=mask, c=config: make_attn_plan(m, setting.cp_size, HEADS, c))
            for mask in masks
        ]
        row[name] = summarise([plan for plan, _ in made], [ms for _, ms in made])
    for name in ("swap_fine", "swap_auto"):
        received = row[name]["received_own"]
        for base in ("lpt_fine", "lpt_2048"):
            row[name][f"over_{base}"] = round(received / max(row[base]["received_own"], 1e-9), 3)
    return row


def measure_speed(setting: Setting, count: int, chunk_size: int | None) -> dict[str, Any]:
    """Where the time of a plan goes: token layout, whole plan, one rank's view."""
    row: dict[str, Any] = {"what": "speed", **asdict(setting), "packs": count}
    for balancer, trials in (("lpt", 0), ("swap", None)):
        config = MagiConfig(chunk_size=chunk_size, costs=CostTable(swap_trials=trials))
        cells: dict[str, list[float]] = {"dispatch": [], "plan": [], "rank_view": []}
        plans = []
        for mask in packs(setting, count):
            cells["dispatch"].append(
                timed(lambda m=mask, c=config: choose_token_layout(m, setting.cp_size, c), 3)[1]
            )
            plan, ms = timed(
                lambda m=mask, c=config: make_attn_plan(m, setting.cp_size, HEADS, c), 3
            )
            cells["plan"].append(ms)
            cells["rank_view"].append(timed(lambda p=plan: p.rank_plan(1))[1])
            plans.append(plan)
        row[balancer] = {
            "chunks": len(plans[-1].layout.chunk_ranks),
            "received_own": summarise(plans, [0.0])["received_own"],
            "imbalance_max": summarise(plans, [0.0])["imbalance_max"],
            **{f"{k}_ms_p50": round(statistics.median(v), 3) for k, v in cells.items()},
        }
    return row


def measure_budget(setting: Setting, count: int) -> dict[str, Any]:
    """Rows received and time against the budget of the swap search."""
    row: dict[str, Any] = {"what": "budget", **asdict(setting), "packs": count, "fine": FINE}
    masks = list(packs(setting, count))
    for trials in (0, 2_000, 20_000, None, 1_000_000):
        config = MagiConfig(chunk_size=FINE, costs=CostTable(swap_trials=trials))
        made = [
            timed(lambda m=mask, c=config: make_attn_plan(m, setting.cp_size, HEADS, c))
            for mask in masks
        ]
        name = "default" if trials is None else str(trials)
        row[name] = summarise([plan for plan, _ in made], [ms for _, ms in made])
    return row


def run(count: int) -> list[dict[str, Any]]:
    rows = []
    for distribution in DISTRIBUTIONS:
        for cut in (True, False):
            for cp_size in (4, 8, 64):
                for tokens in (8192, 16384):
                    setting = Setting(distribution, cut, cp_size, tokens)
                    packs_here = count if cp_size < 64 else max(1, count // 4)
                    rows.append(measure_quality(setting, packs_here))
                    show_quality(rows[-1], setting)
        rows.append(measure_budget(Setting(distribution, True, 8, 16384), count // 2))
        for tokens, chunk_size in ((8192, 512), (49152, None)):  # 1,024 chunks; 3M tokens
            setting = Setting(distribution, True, 64, tokens)
            rows.append(measure_speed(setting, max(1, count // 4), chunk_size))
            show_speed(rows[-1], setting)
    return rows


def show_quality(row: dict[str, Any], setting: Setting) -> None:
    cells = []
    for name in ("lpt_2048", "lpt_fine", "swap_fine", "swap_auto"):
        c = row[name]
        ratios = f" ({c['over_lpt_fine']:.2f} {c['over_lpt_2048']:.2f})" if "swap" in name else ""
        cells.append(
            f"{name} {c['received_own']:.2f}{ratios} imb {c['imbalance_mean']:.3f}"
            f"/{c['imbalance_max']:.3f} {c['plan_ms_p50']:.1f}ms"
        )
    print(f"{setting!s:26} | " + " | ".join(cells), row["swap_auto"]["chunk_size"], flush=True)


def show_speed(row: dict[str, Any], setting: Setting) -> None:
    for name in ("lpt", "swap"):
        print(f"{setting!s:26} | speed {name} {row[name]}", flush=True)


def main() -> None:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--packs", type=at_least(1), default=20, help="sampled sequences per setting"
    )
    parser.add_argument("--out", type=new_file, help="record to write")
    given = parser.parse_args()
    units = "received_own: rows received over a rank's own rows, mean over ranks and packs"
    meta = {**describe_cpu(), "seed": SEED, "heads": asdict(HEADS), "units": units}
    write_record(given.out, meta, run(given.packs))


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
