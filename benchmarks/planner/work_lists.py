"""Host time of a new mask's work lists and of the choice of kernel and schedule; no GPU is needed.

    python -m benchmarks.planner.work_lists [--out benchmarks/records/....json]

One core, 64 query and 8 key heads of 128, a GPU of 132 processors. Documents are packed causal ones
of lognormal lengths (median 1,212 tokens), one causal document, or random blocks (at most 512 x 512
of at least 128 tokens, of which 20 % are visible). Each time is the median of all rounds. "lists"
is one forward list of the plain 128 x 128 tile, for comparison; "build" makes and checks the mask;
"deterministic" is the backward of that mode, and "order" what its list has in addition.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.lib.masks import random_blocks
from benchmarks.lib.options import at_least, list_of, new_file
from benchmarks.lib.record import describe_cpu, write_record
from benchmarks.planner.plans import HEADS, packed_causal
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.native import solver

NUM_SMS = 132


def documents(total: int) -> AttnMask:
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(rng.lognormal(7.1, 1.1)) + 1))
    return packed_causal(lengths)


BUILDERS: dict[str, Callable[[int], AttnMask]] = {
    "packed": documents,
    "causal": lambda total: packed_causal([total]),
    "random_blocks": lambda total: random_blocks(total, max(128, total // 512), 0.2),
}


def median_ms(make: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        make()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e3, 4)


def deterministic(mask: AttnMask) -> solver.BwdWorkList:
    return solver.choose_bwd(
        *(mask.slices, mask.total_seqlen_q, mask.total_seqlen_k),
        heads_q=HEADS.num_heads_q,
        heads_kv=HEADS.num_heads_kv,
        head_dim=HEADS.head_dim,
        num_sms=NUM_SMS,
        deterministic=True,
    )


def order_kib(work: solver.BwdWorkList) -> float:
    """Of the order in which dq is added up."""
    return round(sum(x.nbytes for x in (work.places, work.turns, work.segments)) / 1024, 1)


def measure(name: str, tokens: int, rounds: int) -> dict[str, Any]:
    mask = BUILDERS[name](tokens)
    whole = mask.slices, mask.total_seqlen_q, mask.total_seqlen_k
    heads = HEADS.num_heads_q, HEADS.num_heads_kv, HEADS.head_dim, NUM_SMS
    return {
        "mask": name,
        "tokens": tokens,
        "slices": mask.num_slices,
        "build_ms": median_ms(lambda: BUILDERS[name](tokens), rounds),
        "forward_ms": median_ms(lambda: solver.choose_fwd(*whole, *heads), rounds),
        "backward_ms": median_ms(lambda: solver.choose_bwd(*whole, *heads), rounds),
        "lists_ms": median_ms(lambda: solver.fwd_work_list(*whole), rounds),
        "deterministic_ms": median_ms(lambda: deterministic(mask), rounds),
        "order_kib": order_kib(deterministic(mask)),
    }


def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=list_of(at_least(1)), default=[4096, 16384, 65536, 1048576]
    )
    parser.add_argument("--rounds", type=at_least(1), default=21)
    parser.add_argument("--out", type=new_file, help="record to write")
    given = parser.parse_args(argv)
    rows = []
    for tokens in given.tokens:
        for name in BUILDERS:
            rows.append(measure(name, tokens, given.rounds))
            print(json.dumps(rows[-1]), flush=True)
    write_record(given.out, describe_cpu(), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
