"""Megatron's own pretrain_gpt.py with and without our flag, on the GPUs of one host.

    python -m benchmarks.train.pretrain --megatron CHECKOUT agree --record FILE.json

`agree`: losses and gradient norms of small bf16 models in several layouts, against stock attention
at one rank. The other parts have layers of TransformerEngine: `flags` and `delta_net`, on two GPUs,
and `flags_4gpus` and so on (pretrain_te.py); `te_speed_2gpus` and so on next to its context
parallelism, `balance_speed_2gpus` and so on with real lengths of documents, `sample_speed` with a
sample a step on one GPU, `graph_speed` and `graph_speed_2gpus` with attention in CUDA graphs
(whole_steps.py). pairs.py says in what a stock case and its counterpart may differ.
Every case has processes of its own under CUDA_DEVICE_MAX_CONNECTIONS=1, which have imported all
packages before it begins (warm_ranks.py). The cases of parts with `speed` come in random order in
every round, and no process imports while one is timed. corpora.py makes the data.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.lib.command import command_line
from benchmarks.lib.options import at_least, new_file, positive
from benchmarks.lib.record import describe, write_record
from benchmarks.train.corpora import corpus
from benchmarks.train.pretrain_cases import AGREE, WORK, Case, words
from benchmarks.train.pretrain_te import delta_net_cases, flag_cases, host_cases
from benchmarks.train.step_profile import read_profile
from benchmarks.train.warm_ranks import Job, WarmRanks
from benchmarks.train.whole_steps import balance_cases, graph_cases, sample_cases, whole_step_cases
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError

ROOT = Path(__file__).parents[2]
PARTS: dict[str, Callable[[], list[Case]]] = {
    "agree": lambda: AGREE,
    "flags": flag_cases,
    "delta_net": delta_net_cases,
    "graph_speed": functools.partial(graph_cases, 1),
    "graph_speed_2gpus": functools.partial(graph_cases, 2),
    **{f"flags_{n}gpus": functools.partial(host_cases, n) for n in (4, 8)},
    "sample_speed": sample_cases,
    "te_speed_1gpu": functools.partial(whole_step_cases, 1),
    **{f"te_speed_{n}gpus": functools.partial(whole_step_cases, n) for n in (2, 4, 8)},
    **{f"balance_speed_{n}gpus": functools.partial(balance_cases, n) for n in (2, 4, 8)},
}
"""The cases of every part."""


def main() -> None:
    options = parse()
    cases = chosen_cases(options)
    sys.path.insert(0, str(options.megatron))
    data = {x: corpus(x, Path(tempfile.mkdtemp())) for x in {case.documents for case in cases}}
    rows: list[dict[str, Any]] = []
    meta = {**describe(command_line(), options.commit), "part": options.part}
    deadline = time.monotonic() + options.limit_s
    quiet = "speed" in options.part
    most = max(case.gpus for case in cases)
    ahead = min(sum(case.gpus for case in cases), 32) if quiet else most * options.at_once + 4
    pool = WarmRanks(
        options.megatron, environment(options.megatron), ahead, quiet, one_gpu=options.one_gpu
    )

    def measure(shared: Round, case: Case) -> None:
        with shared.turn_of(case):
            if time.monotonic() > deadline:
                print("time is up, left out:", shared.number, case.name, flush=True)
                return
            rows.append({"round": shared.number, **run_case(case, options, shared, pool)})
            print(summary(rows[-1]), flush=True)
            write_record(options.record, meta, rows)

    with pool, ThreadPoolExecutor(options.at_once) as threads:
        for number in range(options.rounds):
            shared = Round(number, cases, data)
            in_turn = in_order(cases, options.part, number)
            list(threads.map(functools.partial(measure, shared), in_turn))


class Round:
    """What the cases of one round share."""

    def __init__(self, number: int, cases: list[Case], data: dict[str | None, Path]) -> None:
        """
        Args:
            number: of the round.
            cases: all of the round.
            data: prefix of each corpus, by `Case.documents`.
        """
        self.number, self.data = number, data
        self.work = Path(tempfile.mkdtemp())
        """Where a case leaves what another one reads."""
        self._ended = {case.name: threading.Event() for case in cases}

    @contextlib.contextmanager
    def turn_of(self, case: Case) -> Iterator[None]:
        """Enter when the case that this one comes after has ended; leave when this one has."""
        if case.after is not None:
            self._ended[case.after].wait()
        try:
            yield
        finally:
            self._ended[case.name].set()


def in_order(cases: list[Case], part: str, number: int) -> list[Case]:
    """Cases whose times are compared come in random order, others as they are listed."""
    return random.Random(number).sample(cases, len(cases)) if "speed" in part else cases


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Those that --only names and what they come after, or all.

    Raises:
        UsageError: it names none.
    """
    cases = PARTS[options.part]()
    wanted = options.only or [""]
    chosen = [case for case in cases if any(word in case.name for word in wanted)]
    needed = {case.after for case in chosen}
    chosen = [case for case in cases if case in chosen or case.name in needed]
    if not chosen:
        names = ", ".join(case.name for case in cases)
        raise UsageError(f"--only must be part of a case's name, got {wanted}; cases: {names}")
    return chosen


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--megatron", type=Path, required=True, help="a Megatron-LM checkout")
    parser.add_argument("--record", type=new_file, required=True)
    parser.add_argument("--rounds", type=at_least(1), default=1)
    parser.add_argument("--limit-s", type=positive, default=1e9, help="start no case after it")
    parser.add_argument("--only", nargs="*", help="cases whose name has one of these words")
    parser.add_argument("--case-limit-s", type=positive, default=180, help="stop a case after it")
    parser.add_argument("--commit")
    parser.add_argument(
        "--at-once", type=at_least(1), default=1, help="cases that share the GPUs: losses alone"
    )
    parser.add_argument("--one-gpu", action="store_true", help="for all ranks: losses alone")
    options = parser.parse_args()
    if (options.at_once > 1 or options.one_gpu) and "speed" in options.part:
        parser.error("--at-once and --one-gpu are for losses: ranks that share a GPU have no times")
    if not (options.megatron / "pretrain_gpt.py").is_file():
        parser.error(f"--megatron needs a checkout with pretrain_gpt.py, got {options.megatron}")
    return options


def environment(megatron: Path) -> dict[str, str]:
    """Variables of every case's processes. Megatron comes first: its `tools` are not ours."""
    paths = [str(megatron), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",  # as torchrun sets it
        "PYTHONWARNINGS": "ignore",
    }


def run_case(
    case: Case, options: argparse.Namespace, shared: Round, pool: WarmRanks
) -> dict[str, Any]:
    """Run the script on warm ranks and read its log."""
    given = words({**case.all_flags, "data-path": str(shared.data[case.documents])})
    flags = [word.replace(WORK, str(shared.work)) for word in given]
    module = "megatron_magi.run" if "speed" in options.part else "benchmarks.train.pretrain_named"
    module = case.module or module
    script = str(options.megatron / case.script)
    started = time.monotonic()
    job = Job(case.gpus, module, [script, *flags], case.environment)
    outcome = pool.run(job, options.case_limit_s)
    return {
        "case": case.name,
        "gpus": case.gpus,
        "flags": flags,
        "environment": case.environment,
        "seconds": round(time.monotonic() - started, 1),
        **read_log(outcome.output),
        **_profile(case, shared),
        **({"error": first_error(outcome.output)} if outcome.failed else {}),
    }


def _profile(case: Case, shared: Round) -> dict[str, Any]:
    """Parts of one step, of a case that has been told to write a trace."""
    path = shared.work / "torch_profile" / "rank-0.json.gz"
    if "profile" not in case.flags or not path.is_file():
        return {}
    profile = read_profile(path)
    path.unlink()
    return {"profile": profile}


def read_log(output: str) -> dict[str, Any]:
    """Series of Megatron's log, our start-up line, and Megatron's report of memory."""

    def series(name: str) -> list[float]:
        return [float(x) for x in re.findall(rf" {re.escape(name)}: +([-+.\deEnaif]+)", output)]

    lines = [line for line in output.splitlines() if line.startswith("megatron_magi")]
    return {
        "loss": series("lm loss"),
        "grad_norm": series("grad norm"),
        "ms": series("elapsed time per iteration (ms)"),
        "imbalance": series("magi imbalance")[-3:],
        "received": series("magi key rows received")[-3:],
        "plan_ms": series("magi plan ms")[-3:],
        "memory": re.findall(r"max allocated: ([\d.]+)", output)[:2],
        "lines": lines,
    }


def first_error(output: str) -> str:
    """The lines that name an error, and the log before the first of them."""
    lines = output.splitlines()
    named = [i for i, line in enumerate(lines) if re.search(r"\w(Error|Exception)\b", line)]
    if not named:
        return output[-2000:]
    start = max(0, named[0] - 12)
    return "\n".join(line[-400:] for line in [*lines[start : named[0]], *(lines[i] for i in named)])


def summary(row: dict[str, Any]) -> str:
    """One line for the screen."""
    times = sorted(row["ms"][3:])
    median = times[len(times) // 2] if times else float("nan")
    losses = " ".join(f"{x:.5f}" for x in row["loss"][:3] + row["loss"][-1:])
    return f"{row['case']:28} {median:9.1f} ms  loss {losses}  {row.get('error', '')[-1200:]}"


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
