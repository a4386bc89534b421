"""How replicas wait for each other, from measured times of single samples.

    python -m benchmarks.train.pretrain ... sample_speed --record SAMPLES.json
    python -m benchmarks.train.replicas SAMPLES.json [--out benchmarks/records/....json]

A replica's step is the sum of its samples' measured steps, and all replicas wait for the slowest;
their exchange of gradients is left out. Next to it stands the same from predicted times
(`megatron-magi plan --layouts`). Samples are dealt as `--magi-balance-step` deals them.
"""

from __future__ import annotations

import functools
import tempfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.lib.options import new_file
from benchmarks.lib.record import describe_cpu, record_of, write_record
from benchmarks.planner.layouts import HEADS, MODEL
from benchmarks.train.corpora import HIGHEST, corpus
from benchmarks.train.whole_steps import SLOW_STEPS
from megatron_magi.balance import deal_step, document_lengths, order_of_megatron
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.launcher.file_samples import SEED

DIVISIONS = ((4, 1, False), (8, 1, False), (4, 4, False), (4, 4, True))
"""Replicas, samples of each in a step, and whether they are dealt."""


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("samples", type=Path, help="a record of pretrain.py's sample_speed")
    parser.add_argument("--out", type=new_file)
    options = parser.parse_args()
    record = record_of(options.samples, "benchmarks.train.pretrain", ("case", "ms"))
    rows = [row_of(each) for each in record["rows"] if "error" not in each]
    print("\n".join(table(rows)))
    if options.out:
        write_record(options.out, {**describe_cpu(), "samples": options.samples.name}, rows)
    return 0


def row_of(run: dict[str, Any]) -> dict[str, Any]:
    """Measured and predicted times of a run's samples, and of steps made of them."""
    documents, length = run["case"].split()[-2:]
    distribution = documents.removesuffix("-docs")
    measured = np.array(run["ms"][SLOW_STEPS:]) / 1e3
    lengths = sample_lengths(distribution, int(length), SLOW_STEPS + len(measured))
    predicted = np.array([MODEL.sample_seconds(x, HEADS) for x in lengths[SLOW_STEPS:]])
    slope, rest = np.polyfit(predicted, measured, 1)
    return {
        "run": run["case"],
        "measured_s": measured.tolist(),
        "predicted_s": predicted.tolist(),
        "fit": [slope, rest],
        "fit_error": float(np.abs(slope * predicted + rest - measured).max() / measured.mean()),
        "waiting": [
            [over_mean(times, predicted, *division) for times in (measured, predicted)]
            for division in DIVISIONS
        ],
    }


def over_mean(times: np.ndarray, costs: np.ndarray, replicas: int, each: int, dealt: bool) -> float:
    """Time of the slowest replica over the mean replica's, summed over steps.

    Args:
        times: float64 [samples], in the order of training; the last incomplete step is left out.
        costs: float64 [samples], by which they are dealt.
        replicas: that share a step.
        each: samples of one of them.
        dealt: by cost, or in Megatron's order.
    """
    size = replicas * each
    steps = [slice(i, i + size) for i in range(0, len(times) - size + 1, size)]
    slowest = mean = 0.0
    for step in steps:
        by_cost = deal_step((costs[step] * 1e9).astype(np.int64), replicas, 1)
        places = by_cost if dealt else order_of_megatron(size, replicas, 1)
        sums = times[step][places].sum(axis=(1, 2))
        slowest, mean = slowest + sums.max(), mean + sums.mean()
    return float(slowest / mean)


@functools.cache
def sample_lengths(distribution: str, length: int, count: int) -> list[Any]:
    """Document lengths of the first samples on which pretrain.py trains with this corpus."""
    import megatron_magi.launcher  # noqa: F401  prepares Megatron before it is imported
    from megatron_magi.launcher.cpu import skip_compilation_of_wheels

    skip_compilation_of_wheels()
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    with tempfile.TemporaryDirectory() as folder:
        config = GPTDatasetConfig(
            random_seed=SEED,
            sequence_length=length,
            blend=([str(corpus(distribution, Path(folder)))], None),
            split="100,0,0",
            path_to_cache=f"{folder}/cache",
            tokenizer=SimpleNamespace(
                unique_identifiers=OrderedDict(name="numbers"), eod=HIGHEST, vocab_size=HIGHEST + 1
            ),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        sizes = (count, 0, 0)
        built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
        return [document_lengths(built[0], number) for number in range(count)]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown; a cell of waiting is measured (predicted)."""
    names = [
        f"{replicas} replicas x {each}{', dealt' if dealt else ''}"
        for replicas, each, dealt in DIVISIONS
    ]
    head = ["run", "samples", "mean, ms", "slowest, ms", "predicted mean", "error of fit", *names]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in sorted(rows, key=lambda each: each["run"]):
        measured, predicted = np.array(row["measured_s"]) * 1e3, np.array(row["predicted_s"]) * 1e3
        cells = [
            f"`{row['run']}`", str(len(measured)),
            f"{measured.mean():.0f}", f"{measured.max():.0f}", f"{predicted.mean():.0f}",
            f"{row['fit_error']:.1%}",
            *(f"{got:.2f} ({wanted:.2f})" for got, wanted in row["waiting"]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
