"""One long sequence on one GPU: times, peak memory, and sampled rows against fp64.

    python -m benchmarks.kernel.long                                     # a million tokens, causal
    python -m benchmarks.kernel.long --tokens 1048576 --record long.json
    python -m benchmarks.kernel.long --device cpu --tokens 300 --heads 4,2 --head-dim 16

Rows of out, lse and dq need one row of scores each, and rows of dk and dv one column of scores, so
they can be computed exactly at any length. Columns are weighted with the kernel's own lse, which
the sampled rows check. Samples lie at both ends, at the middle, and on both sides of element 2^31
of q. An error is the norm of the difference over the norm of the exact row, the largest of the
samples; the script ends with 1 if one is above 2^-6 of out and lse (bf16 rounds by up to 2^-9) or
2^-5 of a gradient, most of whose summands cancel. A row of dq all of whose summands cancel, as that
of a query that sees one key, counts as at least 2^-8 of their sizes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import megatron_magi as magi
from benchmarks.lib.options import at_least, head_counts, new_file
from benchmarks.lib.record import describe
from megatron_magi import masks
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser

MOST_ERROR = {"out": 2**-6, "lse": 2**-6, "dq": 2**-5, "dk": 2**-5, "dv": 2**-5}
CHUNK = 1 << 16
"""Query rows of a column that are weighted at a time."""


def sampled_rows(tokens: int, row_elements: int) -> list[int]:
    edge = 2**31 // row_elements
    wanted = (0, 1, 127, edge - 1, edge, tokens // 2, tokens - 129, tokens - 1)
    return sorted({row for row in wanted if 0 <= row < tokens})


class Exact:
    """Exact rows and columns of causal attention."""

    def __init__(self, inputs: list[Tensor], out: Tensor, lse: Tensor) -> None:
        self.q, self.k, self.v, self.dout = inputs
        self.out, self.lse = out, lse
        self.group = self.q.shape[1] // self.k.shape[1]
        self.scale = self.q.shape[2] ** -0.5
        self.least_dq = 0.0
        """What the last row's dq counts as at least."""

    def row(self, i: int, head: int) -> dict[str, Tensor]:
        """out [D], lse [] and dq [D] of a query."""
        kv = head // self.group
        k, v = (x[: i + 1, kv].double() for x in (self.k, self.v))
        scores = k @ self.q[i, head].double() * self.scale
        lse = scores.logsumexp(0)
        p, dout = (scores - lse).exp(), self.dout[i, head].double()
        out = p @ v
        dp, delta = v @ dout, out @ dout
        summands = p * (dp.abs() + delta.abs()) * k.norm(dim=1) * self.scale
        self.least_dq = 2**-8 * float(summands.sum())
        return {"out": out, "lse": lse, "dq": (p * (dp - delta)) @ k * self.scale}

    def column(self, j: int, kv: int) -> dict[str, Tensor]:
        """dk and dv [D] of a key: the sums over the queries that see it."""
        heads = slice(kv * self.group, (kv + 1) * self.group)
        k, v = self.k[j, kv].double(), self.v[j, kv].double()
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for start in range(j, len(self.q), CHUNK):
            rows = slice(start, start + CHUNK)
            q, dout, out = (x[rows, heads].double() for x in (self.q, self.dout, self.out))
            p = (q @ k * self.scale - self.lse[rows, heads].double()).exp()
            ds = p * (dout @ v - (dout * out).sum(-1))
            dk += torch.einsum("th,thd->d", ds, q) * self.scale
            dv += torch.einsum("th,thd->d", p, dout)
        return {"dk": dk, "dv": dv}


def largest_errors(exact: Exact, grads: dict[str, Tensor]) -> dict[str, float]:
    """By tensor, over the sampled rows of the first and the last head."""
    made = {"out": exact.out, "lse": exact.lse, **grads}
    worst = dict.fromkeys(made, 0.0)
    tokens, heads_q, width = exact.q.shape
    heads_kv = exact.k.shape[1]
    for row in sampled_rows(tokens, heads_q * width):
        for head, kv in ((0, 0), (heads_q - 1, heads_kv - 1)):
            wanted = exact.row(row, head) | exact.column(row, kv)
            for name, x in wanted.items():
                got = made[name][row, kv if name in ("dk", "dv") else head].double()
                least = exact.least_dq if name == "dq" else 0.0
                error = float((got - x).norm()) / max(float(x.norm()), least, 1e-30)
                worst[name] = max(worst[name], error)
    return worst


def timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result and seconds; the first call with a mask also makes its work list."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - began


def run(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads_q, heads_kv = args.heads
    gen = torch.Generator(device).manual_seed(0)
    shapes = [(args.tokens, h, args.head_dim) for h in (heads_q, heads_kv, heads_kv, heads_q)]
    inputs = [torch.empty(s, dtype=dtype, device=device).normal_(generator=gen) for s in shapes]
    *qkv, dout = inputs
    leaves = [x.requires_grad_() for x in qkv]
    mask = masks.causal(args.tokens)
    (out, meta), forward_s = timed(lambda: magi.flex_flash_attn_func(*leaves, slices=mask), device)
    made, backward_s = timed(lambda: torch.autograd.grad(out, leaves, dout), device)
    flops = 4 * mask.area() * heads_q * args.head_dim
    row: dict[str, Any] = {
        "mask": "causal", "tokens": args.tokens, "heads": args.heads, "head_dim": args.head_dim,
        "elements_of_q": inputs[0].numel(), "forward_s": round(forward_s, 2),
        "backward_s": round(backward_s, 2), "forward_tflops": round(flops / forward_s / 1e12, 1),
        "backward_tflops": round(2.5 * flops / backward_s / 1e12, 1),
    }  # fmt: skip
    if device.type == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 1)
        row["inputs_and_results_gib"] = round(
            sum(x.nbytes for x in (*inputs, out, meta.lse, *made)) / 2**30, 1
        )
    with torch.no_grad():
        exact = Exact([x.detach() for x in inputs], out.detach(), meta.lse.detach())
        row["errors"] = largest_errors(exact, dict(zip(("dq", "dk", "dv"), made, strict=True)))
    return row


def main() -> None:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=at_least(1), default=1 << 20)
    parser.add_argument(
        "--heads", type=head_counts, default=[64, 8],
        help="query, key/value heads",
    )  # fmt: skip
    parser.add_argument("--head-dim", type=at_least(1), default=128)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--record", type=new_file, help="write a JSON record")
    parser.add_argument("--commit", help="for the record, where there is no git")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, got none; pass --device cpu with fewer --tokens")
    row = run(args)
    print(json.dumps(row), flush=True)
    if args.record is not None:
        command = "python -m benchmarks.kernel.long " + " ".join(sys.argv[1:])
        meta = {**describe(command, args.commit), "date": str(datetime.date.today())}
        args.record.write_text(json.dumps({"meta": meta, "rows": [row]}, indent=1) + "\n")
    if not all(row["errors"][name] <= most for name, most in MOST_ERROR.items()):
        raise SystemExit(1)


if __name__ == "__main__":
    raise SystemExit(guarded(main))
