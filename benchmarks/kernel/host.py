"""Host time of an attention call with a cached plan: what Python and the driver take to launch it.

    python -m benchmarks.kernel.host [--record host.json]

The mask is small, so that the GPU is done long before the host: bursts of calls, each burst waited
for outside the clock, the median of all bursts. Levels:
  kernel  the backend below the op
  op      flex_flash_attn_func with autograd, its backward by a torch.autograd.grad of its own
  chain   16 layers of it, each attending from the output of the one before, the backward by one
          torch.autograd.grad as in a training step; per layer
For comparison, in random order: PyTorch's own attention (sdpa) on dense inputs of the same size,
and an autograd function in Python that allocates its results and does nothing (noop): what autograd
itself takes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.lib.options import at_least, new_file
from benchmarks.lib.record import describe, write_record
from megatron_magi import flex_flash_attn_func, masks
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.slice_table import SliceTable

BURST = 20
LAYERS = 16
TOKENS, HEADS, DIM = 256, (8, 2), 128

Calls = dict[str, Callable[[], object]]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def calls() -> Calls:
    """By (implementation, level, direction), joined by spaces."""
    shapes = [(TOKENS, h, DIM) for h in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    q, k, v, dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    mask, scale = masks.from_cu_seqlens([0, 100, TOKENS]), DIM**-0.5
    table = SliceTable(mask.slices, TOKENS, TOKENS)
    kernel = select_backend("cuda", q.device, q.dtype)
    out, lse = kernel.forward(AttnCall(q, k, v, table, scale))

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_flash_attn_func(q, k, v, slices=mask)[0]

    made: Calls = {
        "ours kernel fwd": lambda: kernel.forward(AttnCall(q, k, v, table, scale)),
        "ours kernel bwd": lambda: kernel.backward(
            AttnCall(q, k, v, table, scale), GradCall(dout, lse, out=out, dtype=q.dtype)
        ),
    }
    dense = [x.transpose(0, 1)[None] for x in (q, k, v, dout)]
    for name, attention, (*qkv, grad) in (
        ("ours", ours, (q, k, v, dout)),
        ("sdpa", _sdpa, dense),
        ("noop", _Noop.apply, (q, k, v, dout)),
    ):
        made |= _with_autograd(name, "op", attention, qkv, grad, 1)
        made |= _with_autograd(name, "chain", attention, qkv, grad, LAYERS)
    return made


def _with_autograd(
    name: str,
    level: str,
    attention: Attention,
    qkv: list[torch.Tensor],
    grad: torch.Tensor,
    layers: int,
) -> Calls:
    """Forward and backward of that many layers, each with keys and values of its own."""
    leaves = [qkv[0].clone().requires_grad_()]
    leaves += [x.clone().requires_grad_() for _ in range(layers) for x in qkv[1:]]

    def run() -> torch.Tensor:
        x = leaves[0]
        for i in range(layers):
            x = attention(x, leaves[2 * i + 1], leaves[2 * i + 2])
        return x

    out = run()
    return {
        f"{name} {level} fwd": run,
        f"{name} {level} bwd": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
    }


class _Noop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*qkv)
        return torch.empty_like(qkv[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def host_us(name: str, call: Callable[[], object]) -> float:
    """Microseconds of one layer's call in a burst."""
    layers = LAYERS if " chain " in name else 1
    calls = max(1, BURST // layers)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e6 * took / (calls * layers)


def main() -> None:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bursts", type=at_least(1), default=200)
    parser.add_argument("--record", type=new_file, help="write a JSON record")
    parser.add_argument("--commit", help="for the record, where there is no git")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("a Hopper GPU is needed, got none; run this on one")
    made = calls()
    times: dict[str, list[float]] = {name: [] for name in made}
    shuffled = random.Random(0)
    for burst in range(args.bursts + 5):
        for name, call in shuffled.sample(list(made.items()), len(made)):
            took = host_us(name, call)
            if burst >= 5:  # plans, libraries and the allocator are warm
                times[name].append(took)
    rows = []
    for name, us in times.items():
        impl, level, direction = name.split()
        row = {"impl": impl, "level": level, "direction": direction}
        shown = {"us": statistics.median(us), "min_us": min(us), "max_us": max(us)}
        rows.append({**row, **{k: round(x, 1) for k, x in shown.items()}, "n": len(us)})
        print(f"{name:16s} {shown['us']:6.1f} us (least {shown['min_us']:.1f})", flush=True)
    command = f"python -m benchmarks.kernel.host --bursts {args.bursts}"
    write_record(args.record, describe(command, args.commit), rows)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
