"""Compiles FlexAttention for all its cases at once, in processes of their own; the benchmark then
finds the kernels in PyTorch's and Triton's caches on disk."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

from benchmarks.kernel.peers import Flex
from benchmarks.lib.cell import Case, Inputs
from megatron_magi.core.kernel.head_dims import HeadDims


def compile_ahead(cases: list[Case], heads: tuple[int, int], widths: HeadDims, jobs: int) -> None:
    """Failures are printed; the benchmark will meet them again."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        pending = {case: pool.submit(_compile, case, heads, widths) for case in cases}
        for case, done in pending.items():
            if error := done.exception():
                said = f"flex {case.name} {case.seqlen}: not compiled ahead: {error}"
                print(said[:300], file=sys.stderr)


def _compile(case: Case, heads: tuple[int, int], widths: HeadDims) -> None:
    """The backward's call has run the forward."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no pool of workers in each of the processes
    Flex().call(case, "bwd", Inputs.random(case.seqlen, heads, widths))()
