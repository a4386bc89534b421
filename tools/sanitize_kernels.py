"""The CUDA kernels under compute-sanitizer: small masks that touch each code path.

    python -m tools.sanitize_kernels                    # all four tools; exit code 1: a finding
    python -m tools.sanitize_kernels --tools memcheck,racecheck
    python -m tools.sanitize_kernels --widths 192-128   # MLA's kernels alone
    python -m tools.sanitize_kernels --run              # the cases alone, without a tool

Needs one Hopper GPU and compute-sanitizer of the CUDA toolkit. Results are not compared here; that
is what tests/core/kernel does.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_magi import AttnMask, masks
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.head_dims import COMPILED_WIDTHS, HeadDims

ROOT = Path(__file__).resolve().parents[1]
TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": (),
    "racecheck": ("--racecheck-report", "analysis"),
    "synccheck": (),
    # Copies out of a tensor that the copy engine wrote (our stores are its) count as reads of
    # memory that nobody wrote: only what kernels read is looked at.
    "initcheck": ("--check-api-memory-access", "no"),
}
# PyTorch's own kernels are not what is looked at.
OURS = "kernel_substring=magi"


WIDTHS = {f"{w.head_dim}-{w.value_dim}": w for w in COMPILED_WIDTHS}

Sanitized = tuple[AttnMask, HeadDims, torch.dtype, float]
"""Mask, widths, dtype, softcap."""


def cases(chosen: str) -> Iterator[Sanitized]:
    """Masks with full, partial and no tiles at all, ragged ends, windows and tiny documents."""
    some = [
        masks.full(192, 320),
        masks.from_cu_seqlens([0, 130, 161, 400]),
        masks.sliding_window(333, (70, 0)),
        masks.from_cu_seqlens([0, *range(20, 201, 20)], causal=False),
    ]
    both = (torch.bfloat16, torch.float16)
    all_widths = [WIDTHS[name] for name in chosen.split(",")]
    for mask, widths, dtype in itertools.product(some, all_widths, both):
        if dtype == torch.bfloat16 or mask is some[1]:
            yield mask, widths, dtype, 0.0
        if mask is some[1]:
            yield mask, widths, dtype, 2.0


def run_case(mask: AttnMask, widths: HeadDims, dtype: torch.dtype, softcap: float) -> None:
    from megatron_magi.core.kernel.hopper import HopperBackend
    from megatron_magi.core.kernel.sink_gradient import sink_gradient
    from megatron_magi.core.kernel.slice_table import SliceTable

    num_q, num_k = mask.total_seqlen_q, mask.total_seqlen_k
    table = SliceTable(mask.slices, num_q, num_k)
    dim, value_dim = widths
    shapes = ((num_q, 4, dim), (num_k, 2, dim), (num_k, 2, value_dim), (num_q, 4, value_dim))
    # Made on the host: the tools look at our kernels only, so what PyTorch's kernels write counts
    # as uninitialised, while copies are seen.
    q, k, v, dout = (torch.randn(*s).to(dtype).cuda() for s in shapes)
    backend = HopperBackend(q.device, dtype)
    call = AttnCall(q, k, v, table, dim**-0.5, softcap=softcap)
    for deterministic in (False, True):
        out, lse = backend.forward(call)
        show("forward")
        backend.forward(call._replace(max_logits=torch.full((4,), -torch.inf).cuda()))
        show("forward with the largest logits")
        backend.forward(call, prev=(out.cpu().float().cuda(), lse))
        show("forward, continued")
        sink_lse = torch.randn(num_q, 4).cuda()
        backend.forward(call._replace(sink_lse=sink_lse))
        show("forward with sinks")
        delta = (out.cpu().float() * dout.cpu().float()).sum(-1).cuda()
        for sinks in (sink_lse, sink_lse[0]):
            sink_gradient(sinks, lse, delta)
        show("gradient of sinks")
        grad = GradCall(dout, lse, delta, deterministic=deterministic)
        dq, _, _ = backend.backward(call, grad)
        show(f"backward, {deterministic=}")
        backend.backward(call, grad._replace(dq=dq))
        backend.backward(call, grad._replace(dtype=dtype))
        show("backward into given sums, and in 16 bits")


def show(step: str) -> None:
    """A tool may need minutes for a step: which one it is at."""
    torch.cuda.synchronize()
    print(f"  {step}", flush=True)


def run_cases(chosen: str) -> None:
    torch.manual_seed(0)
    for mask, widths, dtype, softcap in cases(chosen):
        shape = f"{mask.total_seqlen_q} x {mask.total_seqlen_k}, {widths}"
        print(f"{shape}, {dtype}, softcap {softcap}", flush=True)
        run_case(mask, widths, dtype, softcap)
    print("all cases ran")


def sanitize(tool: str, widths: str) -> bool:
    """Whether ``tool`` finds nothing."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [program, "--tool", tool, *TOOLS[tool], "--error-exitcode", "9"]
    command += ["--print-limit", "5", "--kernel-name", OURS, sys.executable]
    command += ["-m", "tools.sanitize_kernels", "--run", "--widths", widths]
    begin, last = time.monotonic(), ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as running:
        assert running.stdout is not None
        for line in filter(str.strip, running.stdout):  # shown as it comes: a tool may take minutes
            last = line.rstrip()
            print(f"  {time.monotonic() - begin:4.0f} s {last}", flush=True)
    clean = running.returncode == 0
    print(f"{tool}: {'clean' if clean else 'FINDINGS'}: {last}", flush=True)
    return clean


def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="of: " + ", ".join(TOOLS))
    parser.add_argument("--widths", default=",".join(WIDTHS), help="of: " + ", ".join(WIDTHS))
    parser.add_argument("--run", action="store_true", help="run the cases, no tool")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("a Hopper GPU is needed, got none; run this on one", file=sys.stderr)
        return 2
    if options.run:
        run_cases(options.widths)
        return 0
    return 0 if all([sanitize(tool, options.widths) for tool in options.tools.split(",")]) else 1


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
