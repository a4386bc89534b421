"""Host time of a dist_attn call, forward and backward, with everything warm; needs one CPU core.

    python -m benchmarks.distributed.host [--calls 1000] [--profile]

One process plays rank 1 of eight: the process group answers at once, the kernels that attend and
move rows return empty tensors, and calls are not compared (agreement.py measures that). What
is left is what Python and PyTorch do around launches. Microseconds of a call: the lowest tenth of
all calls, which other work on the machine disturbs least, and the least.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_magi as magi
from benchmarks.lib.options import at_least
from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.core.comm import group_cast, group_reduce
from megatron_magi.core.kernel.backend import AttnCall, GradCall, OutLse, StatelessBackend
from megatron_magi.core.runtime import dist_attn
from megatron_magi.core.runtime.agreement import comparison as agreement

RANKS, RANK = 8, 1
TOKENS = 128
HEADS = HeadShape(8, 2, 128)
WARM = 100
US = 1e6
PLANS = {
    "at once": MagiConfig(overlap_degree=0),
    "local first": MagiConfig(overlap_degree=1, forward_mode="local_first"),
    "staged, 2": MagiConfig(overlap_degree=2, forward_mode="staged"),
}


class NoKernel(StatelessBackend):
    """An AttnBackend that makes room for its results and does nothing."""

    name = "none"
    adds_atomically = False

    def forward(
        self,
        call: AttnCall,
        *,
        prev: OutLse | None = None,
        into: OutLse | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> OutLse:
        q, given = call.q, into if prev is None else prev
        if given is not None:
            return given
        return q.new_empty(q.shape, dtype=out_dtype), q.new_empty(q.shape[:2], dtype=torch.float32)

    def backward(self, call: AttnCall, grad: GradCall) -> tuple[Tensor, Tensor, Tensor]:
        assert grad.dkv is not None
        dq = call.q.new_empty(call.q.shape, dtype=grad.dtype) if grad.dq is None else grad.dq
        return dq, *grad.dkv

    def delta(self, out: Tensor, dout: Tensor, dtype: torch.dtype) -> Tensor:
        return out.new_empty(out.shape[:2], dtype=dtype)


def no_sums(own: Sequence[Tensor], *args: Any) -> list[Tensor]:
    return [x.new_empty(x.shape, dtype=args[-1]) for x in own]


@contextmanager
def launching_nothing() -> Iterator[None]:
    agreed, kernel = agreement.Comparison(None, 0, False), NoKernel()
    replaced = (
        (dist_attn, "compare", lambda *_: agreed),
        (dist_attn, "select_backend", lambda *_: kernel),
        (dist_attn, "head_start", lambda *_: None),
        (group_cast, "gather_rows", lambda *_: None),
        (group_reduce, "add_rows", lambda *_: None),
        (group_reduce, "add_rows_into", no_sums),
    )
    with ExitStack() as stack:
        for module, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


def measure(config: MagiConfig, calls: int, profile: cProfile.Profile | None) -> list[list[float]]:
    """Microseconds of every forward, and of every backward."""
    group = dist.group.WORLD
    plan = magi.plan(masks.from_cu_seqlens([0, 40, 41, 90, TOKENS]), group, HEADS, config)
    rows, heads = plan.layout.num_local_tokens, (8, 2, 2, 8)
    *leaves, dout = (torch.randn(rows, h, 128, dtype=torch.bfloat16) for h in heads)
    for x in leaves:
        x.requires_grad_()
    took: list[list[float]] = [[], []]
    for turn in range(WARM + calls):
        if profile is not None and turn == WARM:
            profile.enable()
        began = time.perf_counter()
        out, _ = magi.dist_attn(*leaves, plan, group)
        middle = time.perf_counter()
        torch.autograd.grad(out, leaves, dout)
        ended = time.perf_counter()
        if turn >= WARM:
            took[0].append(US * (middle - began))
            took[1].append(US * (ended - middle))
    if profile is not None:
        profile.disable()
    return took


def main() -> None:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=at_least(1), default=1000)
    parser.add_argument("--profile", action="store_true", help="also show which functions take it")
    args: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    for name, config in PLANS.items():
        profile = cProfile.Profile() if args.profile else None
        with launching_nothing():
            took = measure(config, args.calls, profile)
        for direction, us in zip(("forward", "backward"), map(sorted, took), strict=True):
            print(f"{name:12s} {direction:9s} {us[len(us) // 10]:7.1f} us (least {us[0]:.1f})")
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(20)
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
