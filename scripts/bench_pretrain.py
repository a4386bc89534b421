"""Megatron's own pretrain_gpt.py with and without our flag, on the GPUs of one host.

    python scripts/bench_pretrain.py --megatron CHECKOUT agree --record FILE.json
    python scripts/bench_pretrain.py --megatron CHECKOUT speed --record FILE.json --rounds 2
    python scripts/bench_pretrain.py --megatron CHECKOUT agree --one-gpu --record FILE.json

`agree`: losses and gradient norms of small bf16 models in several layouts, against stock attention
at one rank. `speed`: time of a step of a Llama of about a billion parameters; the peers are what
Megatron runs without TransformerEngine: its dense local attention, and PyTorch's causal SDPA put
in by a layer spec. Every case is a process of its own under CUDA_DEVICE_MAX_CONNECTIONS=1, in
random order in every round. The corpus is made of the Python standard library. With `--one-gpu`
all ranks of a case share one GPU (bench_pretrain_one_gpu.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_kernel_record import describe
from script_options import at_least

from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser, UsageError, positive

ROOT = Path(__file__).parent.parent
Flags = dict[str, Any]
MAGI: Flags = {"attention-backend": "magi"}
SDPA: Flags = {"spec": ["bench_pretrain_sdpa", "layer_spec"]}
ALL_TO_ALL: Flags = {**MAGI, "magi-transport": "all_to_all"}
JOINED: Flags = {**MAGI, "magi-transport": "symm_mem_joined"}
DOCUMENTS: Flags = {"dataloader-inter-document-masking": True}

COMMON: Flags = {
    "bf16": True,
    "micro-batch-size": 1,
    "lr": 1e-3,
    "min-lr": 1e-3,
    "lr-decay-style": "constant",
    "clip-grad": 1.0,
    "weight-decay": 0.1,
    "group-query-attention": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "position-embedding-type": "rope",
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "transformer-impl": "local",
    "no-rope-fusion": True,
    "no-masked-softmax-fusion": True,
    "no-persist-layer-norm": True,
    "no-gradient-accumulation-fusion": True,
    "tokenizer-type": "NullTokenizer",
    "split": "100,0,0",
    "log-interval": 1,
    "eval-iters": 0,
    "eval-interval": 100000,
    "num-workers": 2,
    "distributed-timeout-minutes": 5,
    "make-vocab-size-divisible-by": 64,
}
SMALL: Flags = {
    "num-layers": 4,
    "hidden-size": 512,
    "num-attention-heads": 8,
    "num-query-groups": 4,
    "ffn-hidden-size": 1408,
    "seq-length": 2048,
    "max-position-embeddings": 2048,
    "global-batch-size": 8,
    "train-iters": 20,
    "lr": 2e-4,
    "min-lr": 2e-4,
    "vocab-size": 383,
}
BILLION: Flags = {
    "num-layers": 16,
    "hidden-size": 2048,
    "num-attention-heads": 32,
    "num-query-groups": 8,
    "ffn-hidden-size": 8192,
    "global-batch-size": 4,
    "train-iters": 8,
    "vocab-size": 128255,
    "max-position-embeddings": 131072,
}


@dataclass(frozen=True)
class Case:
    """One run of the script."""

    name: str
    gpus: int
    flags: Flags = field(default_factory=dict)


def layout(cp: int = 1, tp: int = 1, pp: int = 1) -> Flags:
    """Flags of a parallel layout; sequence parallelism beside tensor parallelism."""
    return {
        "context-parallel-size": cp,
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": pp,
        "sequence-parallel": tp > 1,
    }


AGREE = [
    Case("stock cp1", 1, SMALL),
    Case("magi cp1", 1, {**SMALL, **MAGI}),
    Case("magi cp2", 2, {**SMALL, **MAGI, **layout(cp=2)}),
    Case("magi tp2 sp", 2, {**SMALL, **MAGI, **layout(tp=2)}),
    Case("magi pp2", 2, {**SMALL, **MAGI, **layout(pp=2)}),
    Case("magi cp1 documents", 1, {**SMALL, **MAGI, **DOCUMENTS}),
    Case("magi cp2 documents", 2, {**SMALL, **MAGI, **DOCUMENTS, **layout(cp=2)}),
    Case("magi cp2 all_to_all", 2, {**SMALL, **ALL_TO_ALL, **layout(cp=2)}),
    Case("magi cp2 documents all_to_all", 2, {**SMALL, **ALL_TO_ALL, **DOCUMENTS, **layout(cp=2)}),
    Case("magi cp2 documents joined", 2, {**SMALL, **JOINED, **DOCUMENTS, **layout(cp=2)}),
    Case("magi cp2 odd", 2, {**SMALL, **MAGI, **layout(cp=2), "seq-length": 2047}),
    Case("stock cp1 odd", 1, {**SMALL, "seq-length": 2047}),
]


def speed_cases() -> list[Case]:
    """The same tokens in a step for everybody at one length."""

    def case(name: str, gpus: int, length: int, *parts: Flags) -> Case:
        flags: Flags = {**BILLION, "seq-length": length}
        for part in parts:
            flags |= part
        return Case(f"{name} {length}", gpus, flags)

    return [
        case("stock local 1gpu", 1, 4096),
        case("stock sdpa 1gpu", 1, 4096, SDPA),
        case("magi 1gpu", 1, 4096, MAGI),
        case("stock sdpa 1gpu", 1, 16384, SDPA),
        case("magi 1gpu", 1, 16384, MAGI),
        case("magi documents 1gpu", 1, 16384, MAGI, DOCUMENTS),
        case("stock sdpa pp2", 2, 32768, SDPA, layout(pp=2)),
        case("stock sdpa tp2", 2, 32768, SDPA, {"tensor-model-parallel-size": 2}),
        case("magi cp2", 2, 32768, MAGI, layout(cp=2)),
        case("magi cp2 documents", 2, 32768, MAGI, DOCUMENTS, layout(cp=2)),
        case("magi cp2 documents all_to_all", 2, 32768, ALL_TO_ALL, DOCUMENTS, layout(cp=2)),
        case("magi cp2 documents joined", 2, 32768, JOINED, DOCUMENTS, layout(cp=2)),
        case("magi cp2 documents", 2, 8192, MAGI, DOCUMENTS, layout(cp=2)),
        case("magi cp2 documents all_to_all", 2, 8192, ALL_TO_ALL, DOCUMENTS, layout(cp=2)),
        case("magi tp2 sp", 2, 32768, MAGI, layout(tp=2)),
        case("magi pp2", 2, 32768, MAGI, layout(pp=2)),
    ]


def main() -> None:
    options = parse()
    cases = chosen_cases(options)
    data = make_corpus(Path(tempfile.mkdtemp()) / "corpus", options.megatron)
    rows: list[dict[str, Any]] = []
    meta = {**describe(" ".join(sys.argv), options.commit), "part": options.part}
    deadline = time.monotonic() + options.limit_s
    for number in range(options.rounds):
        for case in random.Random(number).sample(cases, len(cases)):
            if time.monotonic() > deadline:
                print("time is up, left out:", number, case.name, flush=True)
                continue
            rows.append({"round": number, **run_case(case, options, data)})
            print(summary(rows[-1]), flush=True)
            options.record.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Those that --only names, or all.

    Raises:
        UsageError: it names none.
    """
    cases = AGREE if options.part == "agree" else speed_cases()
    wanted = options.only or [""]
    chosen = [case for case in cases if any(word in case.name for word in wanted)]
    if not chosen:
        names = ", ".join(case.name for case in cases)
        raise UsageError(f"--only must be part of a case's name, got {wanted}; cases: {names}")
    return chosen


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("part", choices=("agree", "speed"))
    parser.add_argument("--megatron", type=Path, required=True, help="a Megatron-LM checkout")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--rounds", type=at_least(1), default=1)
    parser.add_argument("--limit-s", type=positive, default=1e9, help="start no case after it")
    parser.add_argument("--only", nargs="*", help="cases whose name has one of these words")
    parser.add_argument("--one-gpu", action="store_true", help="agree: ranks share a GPU")
    parser.add_argument("--commit")
    options = parser.parse_args()
    if options.one_gpu and options.part != "agree":
        parser.error("--one-gpu is for losses: times of ranks that share a GPU mean nothing")
    if not (options.megatron / "pretrain_gpt.py").is_file():
        parser.error(f"--megatron needs a checkout with pretrain_gpt.py, got {options.megatron}")
    if not options.record.parent.is_dir():
        parser.error(f"--record needs a folder that exists, got {options.record}")
    return options


def make_corpus(prefix: Path, megatron: Path) -> Path:
    """Megatron's .bin and .idx of the standard library's sources: one document a file, bytes."""
    sys.path.insert(0, str(megatron))
    import numpy as np
    import torch

    from megatron_magi import adapter  # noqa: F401  prepares the import of Megatron

    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # isort: skip

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for source in sorted(Path(os.__file__).parent.glob("*.py")):
        tokens = [*source.read_bytes(), 256]
        builder.add_document(torch.tensor(tokens, dtype=torch.int64), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def run_case(case: Case, options: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Run the script under torchrun and read its log."""
    megatron: Path = options.megatron
    shared: Flags = {"distributed-backend": "gloo"} if options.one_gpu else {}
    flags = words({**COMMON, **case.flags, **shared, "data-path": str(data)})
    module = "bench_pretrain_named" if case in AGREE else "megatron_magi.run"
    module = "bench_pretrain_one_gpu" if options.one_gpu else module
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(case.gpus)),
        *("-m", module, str(megatron / "pretrain_gpt.py"), *flags),
    ]
    paths = [str(megatron), str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    started = time.monotonic()
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return {
        "case": case.name,
        "gpus": case.gpus,
        "flags": flags,
        "seconds": round(time.monotonic() - started, 1),
        **read_log(result.stdout),
        **({"error": first_error(result.stdout)} if result.returncode else {}),
    }


def words(flags: Flags) -> list[str]:
    """Command line of flags; True writes the name alone, False and None nothing."""
    line = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        line += [f"--{name}", *map(str, values)]
    return line


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
    raise SystemExit(guarded(main))
