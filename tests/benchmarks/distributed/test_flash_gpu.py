"""FlashAttention-3 itself, where it is installed, on what the ranks of the distributed benchmark's
other methods compute: against the dense answer in fp64, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megatron_magi import AttnMask, masks
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.native import solver
from tests.dense import NAMES, assert_as_good, gradients, random_qkv, summand_scales

TOTAL, RANKS = 1536, 2
EDGES = [0, 1, 3, 100, 107, 700, TOTAL]
MASKS = {
    "full": masks.full(TOTAL),
    "causal": masks.causal(TOTAL),
    "window": masks.sliding_window(TOTAL, (190, 0)),
    "packed_causal": masks.from_cu_seqlens(EDGES),
    "packed_full": masks.from_cu_seqlens(EDGES, causal=False),
    "packed_window": masks.from_cu_seqlens(EDGES, window_size=(63, 0)),
    "unused_rows": masks.from_cu_seqlens(EDGES[:5], total_seqlen=TOTAL),
}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a Hopper GPU"),
]


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.distributed.flash import missing

    if reason := missing():
        pytest.skip(reason)


def calls(mask: AttnMask) -> Iterator[tuple[str, AttnMask]]:
    """Of one rank: contiguous tokens, the two layouts of a zigzag, a step of a ring, everything."""
    from benchmarks.distributed.flash import refuses
    from benchmarks.distributed.peers import Ring
    from benchmarks.distributed.zigzag import ZigzagLayout

    half = TOTAL // RANKS
    down = np.array([1, 1, 0, 0, -1, -1], np.int32) * half
    yield "contiguous", made(solver.cut_slices(mask.slices, half, TOTAL, 0, TOTAL) - down, half)
    layout = ZigzagLayout.of(mask, RANKS)
    rows = len(layout.rows[0])
    for rank in range(RANKS):
        yield f"zigzag {rank}", AttnMask(layout.local_slices(mask, rank), rows, RANKS * rows)
    if refuses("ring", mask) is None:
        ring = Ring.__new__(Ring)
        ring.rank, ring.ranks, ring.layout = 0, RANKS, layout
        for step in range(RANKS):
            yield f"ring {step}", AttnMask(ring._slices(mask, ring.source(step)), rows, rows)
    yield "everything", mask


def made(slices: npt.NDArray[np.int32], rows: int) -> AttnMask:
    return AttnMask(slices, rows, TOTAL)


@pytest.mark.parametrize("name", MASKS)
def test_a_rank_computes_the_dense_answer(name: str) -> None:
    from benchmarks.distributed.flash import FlashKernel

    kernel = FlashKernel(MASKS[name])
    for what, part in calls(MASKS[name]):
        if not len(part.slices):
            continue
        q, k, v, dout = random_qkv(part, 16, 2, 128, torch.bfloat16, len(name), "cuda")
        q, k, v = (x.detach() for x in (q, k, v))
        table = SliceTable.of(part)
        call = AttnCall(q, k, v, table, 128**-0.5)
        out, lse = kernel.forward(call)
        dout[~lse.isfinite()] = 0
        grads = kernel.backward(call, GradCall(dout, lse, out=out, dtype=q.dtype))
        exact = gradients(q, k, v, dout, part, torch.float64)
        same = gradients(q, k, v, dout, part, q.dtype)
        ours = dict(zip(NAMES, (out, lse, *grads), strict=True))
        try:
            assert_as_good(ours, exact, same, q.dtype, summand_scales(exact, q, k, v, dout))
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error
