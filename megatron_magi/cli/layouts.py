"""`plan --layouts`: which division of a job's GPUs is fastest for its documents."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megatron_magi.balance.cost import TILE, causal_tiles
from megatron_magi.balance.layout_times import (
    Division,
    LayoutTime,
    Machine,
    Prices,
    divisions,
    has_nothing_to_gain,
    price,
    recommended,
)
from megatron_magi.cli.mask_shape import few_numbers
from megatron_magi.cli.parser import UsageError

if TYPE_CHECKING:  # the options and their help need no torch
    from megatron_magi import HeadShape

USUAL_MODEL, USUAL_HEADS = "32,4096,14336,128256", "32,8,128"
"""Sizes where --model and --heads are not given."""
ATTENTION_TFLOPS, PRODUCT_TFLOPS = 640.0, 545.0
"""Rates of an H200 in bf16, forward and backward, fitted to steps of single samples
(records/samples_h200_2026-11-29.json); with the products go norms, loss and optimizer."""
LINK_BYTES = 300e9
"""Bytes a second that a rank receives from the other ranks of its host."""
NUM_PLANNED = 8
"""Streams that are planned for the rows of a division."""
BYTES_OF_ACTIVATIONS = 36
"""A layer keeps about this times the hidden size for each token: 150 KB at 4,096."""
BYTES_OF_WEIGHT, BYTES_OF_OPTIMIZER = 6, 12
"""bf16 weight and fp32 gradient on each rank; optimizer state spread over all."""
USABLE_MEMORY = 0.94


@dataclass(frozen=True)
class Model:
    """Sizes of a model whose layers have gated MLPs."""

    layers: int
    hidden: int
    ffn: int
    vocab: int

    def weights_of_layer(self, heads: HeadShape) -> int:
        attention = (heads.num_heads_q + heads.num_heads_kv) * (heads.head_dim + heads.value_dim)
        return self.hidden * (attention + 3 * self.ffn)

    def weights(self, heads: HeadShape) -> int:
        return self.layers * self.weights_of_layer(heads) + 2 * self.hidden * self.vocab

    def sample_seconds(self, lengths: Sequence[int], heads: HeadShape) -> float:
        """One GPU's time for a sample of causal documents, forward and backward, all layers.

        A tile costs 4 products of head size in the forward and 10 in the backward.
        """
        import numpy as np

        channels = heads.num_heads_q * (4 * heads.head_dim + 3 * heads.value_dim)
        tiles = causal_tiles(np.asarray(lengths, dtype=np.int64))
        attention = 2 * TILE * TILE * channels * tiles * self.layers
        products = 6 * sum(lengths) * (
            self.layers * self.weights_of_layer(heads) + self.hidden * self.vocab
        )  # fmt: skip
        return attention / (ATTENTION_TFLOPS * 1e12) + products / (PRODUCT_TFLOPS * 1e12)


def run(options: argparse.Namespace) -> int:
    """Price every division, print a table and a recommendation, 0."""
    job = LayoutJob.of(options)
    times = job.times(_samples(options, job))
    if options.json:
        print(json.dumps(facts(times), indent=1))
    elif options.quiet:
        print(verdict(times))
    else:
        print("\n".join([*job.head(), *table(times), verdict(times)]))
    return 0


@dataclass(frozen=True)
class LayoutJob:
    """A job whose divisions are priced."""

    machine: Machine
    model: Model
    heads: HeadShape
    """Of the whole model."""
    tp: int
    seq_length: int
    batch: int
    steps: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> LayoutJob:
        """From the command line.

        Raises:
            UsageError: an option is missing or does not fit.
        """
        from megatron_magi import HeadShape

        missing = [f"--{name}" for name in ("data", "seq-length", "gpus")
                   if getattr(options, name.replace("-", "_")) is None]  # fmt: skip
        if missing:
            raise UsageError("--layouts requires --data PREFIX, --seq-length N and --gpus N, got "
                             f"no {' and no '.join(missing)}; add what is missing")  # fmt: skip
        tp, pp = options.tp or 1, options.pp or 1
        if options.gpus < 1 or options.gpus % (tp * pp):
            raise UsageError(f"--gpus must be a multiple of {tp * pp} (--tp x --pp), got "
                             f"{options.gpus}; change one of them")  # fmt: skip
        form = "LAYERS,HIDDEN,FFN,VOCAB"
        sizes = options.model or USUAL_MODEL
        model = Model(*few_numbers(sizes, "--model", form, (4,), USUAL_MODEL))
        form, heads = "three numbers Q,KV,DIM", options.heads or USUAL_HEADS
        given = heads.replace("/", ",").replace("x", ",")
        shape = HeadShape(*few_numbers(given, "--heads", form, (3,), USUAL_HEADS, heads))
        tokens = _tokens_that_fit(model, shape, options)
        machine = Machine(options.gpus, options.gpus_per_node or 8, tp * pp, pp,
                          options.replicas_meet, tokens)  # fmt: skip
        batch, steps = options.batch or machine.ranks, options.steps or 50
        return cls(machine, model, shape, tp, options.seq_length, batch, steps)

    def times(self, samples: list[list[list[int]]]) -> list[LayoutTime]:
        """Price the divisions for the samples of some steps: lengths by step and sample.

        Raises:
            UsageError: no division has whole microbatches.
        """
        import numpy as np

        costs = [[self.model.sample_seconds(x, self.heads) for x in step] for step in samples]
        streams = [lengths for step in samples for lengths in step]
        travel = functools.lru_cache(functools.partial(self._exchange, streams))
        prices = Prices(np.array(costs), self.seq_length, travel)
        found = [price(d, prices, self.machine) for d in divisions(self.machine, self.batch)]
        if not found:
            raise UsageError(
                f"--batch must be a multiple of the replicas of some division of "
                f"{self.machine.ranks} ranks, got {self.batch}; pass another"
            )
        return found

    def _exchange(self, streams: list[list[int]], cp_size: int, joined: int, tokens: int) -> float:
        """Seconds for which the rows of the slowest rank travel, in all layers, twice forward."""
        import numpy as np

        from megatron_magi import MagiConfig, masks
        from megatron_magi.core.plan import HeadShape, make_attn_plan

        h, tp = self.heads, self.tp
        heads = HeadShape(h.num_heads_q // tp, max(1, h.num_heads_kv // tp), h.head_dim)
        rows = []
        for first in range(0, min(len(streams), NUM_PLANNED * joined), joined):
            lengths = [n for lengths in streams[first : first + joined] for n in lengths]
            mask = masks.from_cu_seqlens(np.cumsum([0, *lengths]))
            plan = make_attn_plan(mask, cp_size, heads, MagiConfig())
            rows.append(plan.rows_received.max())
        per_row = heads.kv_row_elements * (2 * 2 + 4)  # keys twice in bf16, gradients in fp32
        layers = self.model.layers / self.machine.stages
        return float(np.mean(rows)) * per_row * layers / LINK_BYTES

    def head(self) -> list[str]:
        m, h = self.machine, self.heads
        return [
            f"job       {m.gpus} GPUs in hosts of {m.gpus_per_node}, tp {self.tp}, pp {m.stages}; "
            f"{self.batch} samples of {self.seq_length:,} tokens a step, {self.steps} steps",
            f"model     {self.model.layers} layers of {self.model.hidden:,}, heads "
            f"{h.num_heads_q}/{h.num_heads_kv}x{h.head_dim}; rates of a Hopper GPU, not measured "
            f"on your machine",
            "",
        ]


def _tokens_that_fit(model: Model, heads: HeadShape, options: argparse.Namespace) -> float:
    """Tokens of a microbatch whose activations fit next to weights and optimizer, on one rank.

    A pipeline's first stage holds as many microbatches as there are stages, so that they need the
    room of all layers.
    """
    tp, pp = options.tp or 1, options.pp or 1
    weights = model.weights(heads)
    taken = weights * (BYTES_OF_WEIGHT / (tp * pp) + BYTES_OF_OPTIMIZER / options.gpus)
    free = (options.memory or 80.0) * 2**30 * USABLE_MEMORY - taken
    return max(0.0, free) / (BYTES_OF_ACTIVATIONS * model.hidden * model.layers / tp)


def _samples(options: argparse.Namespace, job: LayoutJob) -> list[list[list[int]]]:
    import numpy as np

    from megatron_magi.launcher.file_samples import FileSamples, open_index

    try:
        samples = FileSamples(open_index(options.data), job.seq_length, eod=options.eod_token)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    return [
        [np.diff(samples.boundaries(step * job.batch + i)).tolist() for i in range(job.batch)]
        for step in range(job.steps)
    ]


def table(times: Sequence[LayoutTime]) -> list[str]:
    """One line for each division, the fastest first."""
    width = max(len(t.division.name) for t in times)
    lines = [f"{'division':<{width}} {'step ms':>9} {'/ ideal':>8} {'worst ms':>9} {'waiting':>8} "
             f"{'exchange ms':>12}"]  # fmt: skip
    for t in sorted(times, key=lambda t: t.mean):
        note = "  activations recomputed" if t.recomputed else ""
        lines.append(
            f"{t.division.name:<{width}} {t.mean * 1e3:>9,.0f} {t.over_ideal:>8.3f} "
            f"{t.worst * 1e3:>9,.0f} {t.waiting:>8.1%} {t.exchange * 1e3:>12,.1f}{note}"
        )
    return [*lines, f"{'ideal':<{width}} {times[0].ideal * 1e3:>9,.0f}", ""]


def verdict(times: Sequence[LayoutTime]) -> str:
    """The recommendation in one line."""
    if has_nothing_to_gain(times):
        return "nothing to gain: data parallelism in stock's order is within 3 % of the ideal"
    best = recommended(times)
    plain = next((t for t in times if t.division.cp_size == 1 and not t.division.dealt), None)
    gain = "" if plain is None else f", {plain.mean / best.mean:.2f}x over {plain.division.name}"
    return f"recommended: {best.division.name} ({best.over_ideal:.3f} of the ideal{gain}): " + (
        _flags(best.division)
    )


def _flags(division: Division) -> str:
    words = [f"--context-parallel-size {division.cp_size}"]
    words += [f"--micro-batch-size {division.joined}"]
    return " ".join([*words, *(["--magi-balance-step"] if division.dealt else [])])


def facts(times: Sequence[LayoutTime]) -> dict[str, Any]:
    """All of it, for programs."""
    best = None if has_nothing_to_gain(times) else recommended(times)
    return {
        "layouts": [
            {**asdict(t), "name": t.division.name, "over_ideal": t.over_ideal} for t in times
        ],
        "recommended": None if best is None else best.division.name,
    }
