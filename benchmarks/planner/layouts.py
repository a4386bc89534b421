"""Predicted step times of divisions of GPUs for three published distributions of document lengths.

    python -m benchmarks.planner.layouts [--gpus 4 8 64] [--out benchmarks/records/....json]
    python -m benchmarks.planner.layouts --table benchmarks/records/....json

The same prices as `megatron-magi plan --layouts`: rates of a Hopper GPU, no device is timed.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.lib.options import at_least, new_file
from benchmarks.lib.record import describe_cpu, record_of, write_record
from benchmarks.planner.plans import DISTRIBUTIONS, SEED
from megatron_magi.balance.layout_times import Machine
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.layouts import LayoutJob, Model, facts, verdict
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.plan import HeadShape
from megatron_magi.launcher.file_samples import FileSamples

MODEL = Model(layers=4, hidden=4096, ffn=14336, vocab=16384)
"""Four layers of the 8B shape; its vocabulary has a whole model's share of the products."""
HEADS = HeadShape(32, 8, 128)
LENGTHS = (32768, 131072)
STEPS = 30
MANY_DOCUMENTS = 400_000


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=at_least(1), nargs="+", default=[4, 8, 64])
    parser.add_argument("--out", type=new_file)
    parser.add_argument("--table", type=Path, help="print the Markdown table of a record")
    options = parser.parse_args()
    if options.table:
        record = record_of(options.table, "benchmarks.planner.layouts", ("layouts", "gpus"))
        print("\n".join(table(record["rows"])))
        return 0
    rows = [
        row(name, length, gpus)
        for length in LENGTHS
        for name in DISTRIBUTIONS
        for gpus in options.gpus
    ]
    print("\n".join(table(rows)))
    if options.out:
        job = {"seed": SEED, "heads": asdict(HEADS), "model": asdict(MODEL), "steps": STEPS}
        write_record(options.out, {**describe_cpu(), **job, "units": "seconds"}, rows)
    return 0


def row(name: str, length: int, gpus: int) -> dict[str, Any]:
    """Times of every division, one sample a GPU and step."""
    began = time.perf_counter()
    machine = Machine(gpus, gpus_per_node=8, model_gpus=1)
    job = LayoutJob(machine, MODEL, HEADS, 1, length, batch=gpus, steps=STEPS)
    samples = FileSamples(documents(name), length, seed=SEED)
    steps = [
        [np.diff(samples.boundaries(step * gpus + i)).tolist() for i in range(gpus)]
        for step in range(STEPS)
    ]
    times = job.times(steps)
    known = {"distribution": name, "seq_length": length, "gpus": gpus}
    return {
        **known, **facts(times), "verdict": verdict(times),
        "seconds_to_price": time.perf_counter() - began,
    }  # fmt: skip


def documents(name: str) -> Any:
    """Lengths of a distribution, as a data file has them."""
    edges, percent = DISTRIBUTIONS[name]
    rng = np.random.default_rng(SEED)
    bins = rng.choice(len(percent), size=MANY_DOCUMENTS, p=np.array(percent) / sum(percent))
    return SimpleNamespace(
        sequence_lengths=rng.integers(np.array(edges)[bins], np.array(edges)[bins + 1])
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: the step over the ideal in data parallelism, and with groups as large as a host.

    Rows below a host of eight are left out.
    """
    lines = [
        "| documents | samples | GPUs | DP, stock's order | CP as large as a host, one sample | "
        "CP, joined | CP, joined and dealt | recommended |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in (row for row in rows if row["gpus"] >= 8):
        most = max(t["division"]["cp_size"] for t in r["layouts"])
        shown = [
            _over_ideal(r["layouts"], cp_size, joined, dealt)
            for cp_size, joined, dealt in (
                (1, 1, False), (most, 1, False), (most, most, False), (most, most, True))
        ]  # fmt: skip
        name = r["recommended"] or "nothing to gain"
        length = f"{r['seq_length'] // 1024}K"
        cells = [r["distribution"], length, str(r["gpus"]), *shown, name]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _over_ideal(times: list[dict[str, Any]], cp_size: int, joined: int, dealt: bool) -> str:
    wanted = {"cp_size": cp_size, "joined": joined, "dealt": dealt}
    found = [t["over_ideal"] for t in times if wanted.items() <= t["division"].items()]
    return f"{found[0]:.2f}" if found else "-"


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
