"""A plan is a pure function: neither earlier plans, nor threads, nor stale memory show in it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.core.native import solver
from megatron_magi.core.plan import make_attn_plan

SEEDS = range(6)


def fingerprint(seed: int) -> int:
    """Of who owns and sends what: a pack of documents, chunk sizes chosen and fixed."""
    rng = np.random.default_rng(seed)
    mask = masks.from_cu_seqlens([0, *np.cumsum(rng.integers(1, 3000, 30)).tolist()])
    config = MagiConfig(chunk_size=128 if seed % 2 else None)
    plan = make_attn_plan(mask, 3 + seed, HeadShape(8, 2, 64), config)
    arrays = (plan.layout.chunk_ranks, plan.transfers, plan.loads)
    return int(solver.hash64(b"".join(a.tobytes() for a in arrays)))


def test_earlier_plans_do_not_show() -> None:
    forwards = {seed: fingerprint(seed) for seed in SEEDS}
    backwards = {seed: fingerprint(seed) for seed in reversed(SEEDS)}
    assert forwards == backwards


def test_threads_do_not_meet() -> None:
    """The solver runs without the GIL."""
    alone = [fingerprint(seed) for seed in SEEDS]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fingerprint, [*SEEDS] * 4)) == alone * 4


def test_stale_memory_does_not_show() -> None:
    """A fresh interpreter whose allocator fills memory with other bytes (glibc)."""
    code = f"from {__name__} import *; print(*map(fingerprint, SEEDS))"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MALLOC_PERTURB_": "165", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert printed == " ".join(map(str, map(fingerprint, SEEDS))) + "\n"
