"""Host time of an attention call with a cached plan: what Python and the driver take to launch it.

    python scripts/bench_kernel_host.py [--record host.json]

The mask is small, so that the GPU is done long before the host: bursts of calls, each burst waited
for outside the clock, the median of all bursts. Beside it PyTorch's own attention (SDPA) on dense
inputs of the same size, in turn. "kernel": the backend below the op; "op": flex_flash_attn_func
with autograd, its backward through torch.autograd.grad as in a training step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_kernel_record import describe

from megatron_magi import flex_flash_attn_func, masks
from megatron_magi.core.kernel.backend import select_backend
from megatron_magi.core.kernel.slice_table import SliceTable

BURST = 20
TOKENS, HEADS, DIM = 256, (8, 2), 128

Calls = dict[str, Callable[[], object]]


def calls() -> Calls:
    """By (implementation, level, direction), joined by spaces."""
    shapes = [(TOKENS, h, DIM) for h in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    q, k, v, dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    mask, scale = masks.from_cu_seqlens([0, 100, TOKENS]), DIM**-0.5
    table = SliceTable(mask.slices, TOKENS, TOKENS)
    kernel = select_backend("cuda", q.device, q.dtype)
    out, lse = kernel.forward(q, k, v, table, scale)
    delta = (out.float() * dout.float()).sum(-1)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def attend() -> torch.Tensor:
        return flex_flash_attn_func(*leaves, slices=mask)[0]

    ours = attend()
    dense = [x.detach().transpose(0, 1)[None].requires_grad_() for x in leaves]
    sdpa = _sdpa(dense)
    grad = dout.transpose(0, 1)[None]
    return {
        "ours kernel fwd": lambda: kernel.forward(q, k, v, table, scale),
        "ours kernel bwd": lambda: kernel.backward(
            dout, q, k, v, lse, delta, table, scale, grad_dtype=q.dtype
        ),
        "ours op fwd": attend,
        "ours op bwd": lambda: torch.autograd.grad(ours, leaves, dout, retain_graph=True),
        "sdpa op fwd": lambda: _sdpa(dense),
        "sdpa op bwd": lambda: torch.autograd.grad(sdpa, dense, grad, retain_graph=True),
    }


def _sdpa(qkv: list[torch.Tensor]) -> torch.Tensor:
    return F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)


def host_us(call: Callable[[], object]) -> float:
    """Microseconds of one call in a burst."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(BURST):
        call()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e6 * took / BURST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bursts", type=int, default=200)
    parser.add_argument("--record", type=Path, help="write a JSON record")
    parser.add_argument("--commit", help="for the record, where there is no git")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("a Hopper GPU is needed, got none; run this on one")
    made = calls()
    times: dict[str, list[float]] = {name: [] for name in made}
    for burst in range(args.bursts + 5):
        for name, call in made.items():
            took = host_us(call)
            if burst >= 5:  # plans, libraries and the allocator are warm
                times[name].append(took)
    rows = []
    for name, us in times.items():
        impl, level, direction = name.split()
        row = {"impl": impl, "level": level, "direction": direction}
        shown = {"us": statistics.median(us), "min_us": min(us), "max_us": max(us)}
        rows.append({**row, **{k: round(x, 1) for k, x in shown.items()}, "n": len(us)})
        print(f"{name:16s} {shown['us']:6.1f} us (least {shown['min_us']:.1f})", flush=True)
    if args.record:
        command = f"python scripts/bench_kernel_host.py --bursts {args.bursts}"
        meta = {**describe(command, args.commit), "date": str(datetime.date.today())}
        args.record.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
