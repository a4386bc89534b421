"""Inputs, masks and the check of the Hopper forward's tests: dense fp64 against every variant."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_magi import AttnMask, AttnSlice, masks
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.hopper import HopperBackend, choice
from megatron_magi.core.kernel.hopper.choice import Variant
from megatron_magi.core.kernel.hopper.forward import launch_forward
from megatron_magi.core.kernel.hopper.launch_values import HeadsKey
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.native import solver
from tests.dense import assert_as_good, dense_attention, dense_largest

WIDTHS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """One input shape; ``mask`` is a name of MASKS."""

    mask: str
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 128
    value_dim: int | None = None
    """None: head_dim."""
    dtype: torch.dtype = BF16
    out_dtype: torch.dtype | None = None
    strided: bool = False
    stages: int = 1  # keys are cut in so many parts that continue from each other
    softcap: float = 0.0
    magnitude: float = 1.0
    """Standard deviation of q, and so of the scaled scores."""
    options: dict = field(default_factory=dict)

    @property
    def widths(self) -> tuple[int, int]:
        return self.head_dim, self.value_dim or self.head_dim

    def __str__(self) -> str:
        flags = f"{'-strided' if self.strided else ''}{f'-stages{self.stages}' * (self.stages > 1)}"
        flags += f"-softcap{self.softcap}" if self.softcap else ""
        flags += f"-q{self.magnitude}" if self.magnitude != 1 else ""
        dtype = str(self.dtype).removeprefix("torch.")
        wide = "-fp32out" if self.out_dtype == FP32 else ""
        head_dim = "-".join(map(str, self.widths))
        return f"{self.mask}-{self.heads}-d{head_dim}-{dtype}{wide}{flags}"


MASKS = {
    "full": masks.full(300, 500),
    "one cell": AttnMask([AttnSlice(2, 3, 1, 2)], 4, 4),
    "one row": masks.full(1, 700),
    "one key": masks.full(700, 1),
    "tile edge": masks.full(193, 81),
    "causal": masks.causal(1000),
    "packed": masks.from_cu_seqlens([0, 5, 70, 71, 300, 428, 700]),
    "packed full": masks.from_cu_seqlens(list(range(0, 705, 64)), causal=False),
    "tiny documents": masks.from_cu_seqlens(list(range(0, 640, 3))),
    "window": masks.sliding_window(900, (255, 0)),
    "two-sided window": masks.sliding_window(500, (40, 70)),
    "block causal": masks.block_causal([[100, 60, 33], [200, 7]]),
    "shared question": masks.shared_question([150, 20], [[90, 33, 64], [5]]),
    "prefix tree": masks.prefix_tree([130, 40, 70, 20], [-1, 0, 0, 1]),
    "nothing": AttnMask([], 200, 30),
    "pad rows": masks.from_cu_seqlens([0, 100, 180], total_seqlen=333),
    "inverse causal": masks.from_ranges([[0, 300]], [[10, 250]], [2], total_seqlen_q=310),
    "bi causal square": masks.from_ranges([[7, 270]], [[7, 270]], [3], total_seqlen_q=300),
    "cut along keys": AttnMask(
        np.concatenate(
            [
                solver.cut_slices(masks.causal(700).slices, 0, 700, k, k + 90)
                for k in range(0, 700, 90)
            ]
        ),
        700,
        700,
    ),
}


def draw(case: Case, mask: AttnMask, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def one(tokens: int, heads: int, width: int) -> Tensor:
        shape = (tokens, heads + 3, width + 16) if case.strided else (tokens, heads, width)
        x = torch.randn(shape, generator=generator, device="cuda", dtype=case.dtype)
        return x[:, 1 : heads + 1, 8 : 8 + width] if case.strided else x

    return (
        case.magnitude * one(mask.total_seqlen_q, case.heads[0], case.widths[0]),
        one(mask.total_seqlen_k, case.heads[1], case.widths[0]),
        one(mask.total_seqlen_k, case.heads[1], case.widths[1]),
    )


def variants(case: Case) -> list[Variant]:
    """Every compiled one, heads packed in every way that divides the group."""
    group = case.heads[0] // case.heads[1]
    packs = [p for p in (1, 2, 4, 8, 16, 32, 64) if group % p == 0]
    tiles = {(m, n) for _, m, n in solver.fwd_variants(*case.heads, case.head_dim)}
    return [Variant(p, m, n) for p in packs for m, n in sorted(tiles)]


def run_variant(
    case: Case,
    mask: AttnMask,
    variant: Variant,
    qkv: tuple[Tensor, Tensor, Tensor],
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One variant on poisoned outputs, in as many stages as the case asks for."""
    q, k, v = qkv
    dtype = FP32 if case.stages > 1 else case.out_dtype or case.dtype
    out = torch.full((*q.shape[:2], v.shape[2]), torch.nan, dtype=dtype, device="cuda")
    lse = torch.full(q.shape[:2], torch.nan, device="cuda")
    num_q, num_k = mask.total_seqlen_q, mask.total_seqlen_k
    key = HeadsKey(*case.heads, *case.widths, q.device)
    bounds = np.linspace(0, num_k, case.stages + 1).astype(int)
    for stage, (k0, k1) in enumerate(itertools.pairwise(bounds)):
        slices = solver.cut_slices(mask.slices, 0, num_q, int(k0), int(k1))
        work = solver.fwd_work_list(
            slices, num_q, num_k, variant.block_m // variant.pack, variant.block_n
        )
        table = SliceTable(slices, num_q, num_k)
        launch = choice.upload_forward(table, key, variant, work)
        call = AttnCall(q, k, v, table, case.head_dim**-0.5, max_logits, case.softcap)
        launch_forward(launch, call, (out, lse), merge=stage > 0)
    return out, lse


def check(case: Case, mask: AttnMask, seed: int, chosen: list[Variant] | None = None) -> None:
    q, k, v = draw(case, mask, seed)
    how = mask, case.head_dim**-0.5, case.softcap
    wide = dense_attention(q.double(), k.double(), v.double(), *how)
    exact = dict(zip(("out", "lse"), wide, strict=True))
    same = dict(zip(("out", "lse"), dense_attention(q, k, v, *how), strict=True))
    largest = v.abs().max().item() if v.numel() else 0.0
    for variant in chosen or variants(case):
        out, lse = run_variant(case, mask, variant, (q, k, v))
        assert_as_good(
            {"out": out, "lse": lse}, exact, same, case.dtype, {"out": largest, "lse": 1.0}
        )
        most = torch.full((case.heads[0],), -torch.inf, device="cuda")
        again = run_variant(case, mask, variant, (q, k, v), most)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)
        rtol = 2**-10.9 if case.softcap else 1e-5  # what the instruction for tanh may err
        torch.testing.assert_close(most.double(), dense_largest(q, k, *how), rtol=rtol, atol=1e-5)


def backend() -> HopperBackend:
    return HopperBackend(torch.device("cuda"), BF16)
