"""Host time of a new mask's work lists and of the choice of kernel and schedule; no GPU is needed.

    python scripts/bench_work_lists.py [--out benchmarks/records/....json]

One core, 64 query and 8 key heads of 128, a GPU of 132 processors. Documents are packed causal ones
of lognormal lengths (median 1,212 tokens), or one causal document. Each time is the median of all
rounds; "lists" is one forward list of the plain 128 x 128 tile, for comparison.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_planner import HEADS, meta, packed_causal

from megatron_magi.cli.one_line import guarded
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


def median_ms(make: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        make()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e3, 4)


def measure(mask: AttnMask, rounds: int) -> dict[str, Any]:
    whole = mask.slices, mask.total_seqlen_q, mask.total_seqlen_k
    heads = HEADS.num_heads_q, HEADS.num_heads_kv, HEADS.head_dim, NUM_SMS
    return {
        "tokens": mask.total_seqlen_q,
        "slices": mask.num_slices,
        "forward_ms": median_ms(lambda: solver.choose_fwd(*whole, *heads), rounds),
        "backward_ms": median_ms(lambda: solver.bwd_work_list(*whole, *heads), rounds),
        "lists_ms": median_ms(lambda: solver.fwd_work_list(*whole), rounds),
    }


def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="4096,16384,65536,1048576")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, help="record to write")
    given = parser.parse_args(argv)
    rows = []
    for tokens in (int(part) for part in given.tokens.split(",")):
        for name, mask in (("packed", documents(tokens)), ("causal", packed_causal([tokens]))):
            rows.append({"mask": name, **measure(mask, given.rounds)})
            print(json.dumps(rows[-1]), flush=True)
    if given.out:
        given.out.write_text(json.dumps({"meta": meta(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
