"""The named cases of the backward's tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_magi import masks
from megatron_magi.core.mask import AttnMask


@dataclass(frozen=True)
class Case:
    name: str
    mask: AttnMask
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 128
    value_dim: int | None = None
    """None: head_dim."""
    dtype: torch.dtype = torch.bfloat16
    strided: bool = False
    scale: float | None = None
    """softmax_scale; None: 1 / sqrt(head_dim)."""
    magnitude: float = 1.0
    """Standard deviation of q."""
    softcap: float = 0.0

    @property
    def widths(self) -> tuple[int, int]:
        return self.head_dim, self.value_dim or self.head_dim


def docs(*lengths: int, causal: bool = True) -> AttnMask:
    return masks.from_cu_seqlens(np.cumsum([0, *lengths]), causal=causal)


def slices_mask(rows: list[tuple[int, ...]], num_q: int, num_k: int) -> AttnMask:
    return AttnMask(np.array(rows, dtype=np.int32).reshape(-1, 6), num_q, num_k)


REGULAR = [
    Case("full", masks.full(256)),
    Case("causal", masks.causal(512)),
    Case("causal-hd64", masks.causal(512), head_dim=64),
    Case("causal-fp16", masks.causal(512), dtype=torch.float16),
    Case("causal-192-128", masks.causal(512), (4, 4), 192, 128),
    Case("causal-hd256", masks.causal(512), head_dim=256),
    Case("causal-hd96", masks.causal(512), head_dim=96),
    Case("window", masks.sliding_window(700, (99, 0))),
]
IRREGULAR = [
    Case("odd-lengths", masks.full(333, 517)),
    Case("documents", docs(1, 63, 64, 65, 200, 17, 300, 2)),
    Case("documents-hd64-fp16", docs(129, 5, 127, 500), head_dim=64, dtype=torch.float16),
    Case("documents-192-128-fp16", docs(129, 5, 127, 500), (4, 4), 192, 128, torch.float16),
    Case("strided-192-128", docs(100, 400), (4, 2), 192, 128, strided=True),
    Case("odd-lengths-192-128", masks.full(333, 517), (3, 3), 192, 128),
    Case("window-192-128", masks.sliding_window(700, (99, 0)), (8, 1), 192, 128),
    Case("documents-hd256-fp16", docs(129, 5, 127, 500), (4, 4), 256, dtype=torch.float16),
    Case("strided-hd256", docs(100, 400), (4, 2), 256, strided=True),
    Case("odd-lengths-hd256", masks.full(333, 517), (3, 3), 256),
    Case("window-hd256", masks.sliding_window(700, (99, 0)), (8, 1), 256),
    Case("tiny-documents-hd256", docs(*[16] * 20, causal=False), head_dim=256),
    Case("documents-hd96-fp16", docs(129, 5, 127, 500), (4, 4), 96, dtype=torch.float16),
    Case("strided-hd96", docs(100, 400), (4, 2), 96, strided=True),
    Case("odd-lengths-hd96", masks.full(333, 517), (3, 3), 96),
    Case("window-hd96", masks.sliding_window(700, (99, 0)), (8, 1), 96),
    Case("tiny-documents-hd96", docs(*[16] * 20, causal=False), head_dim=96),
    Case("tiny-documents", docs(*[16] * 20, causal=False)),
    Case("non-contiguous", docs(100, 400), strided=True),
    Case("group-of-8", masks.causal(500), heads=(8, 1)),
    Case("one-kv-head-each", masks.causal(300), heads=(3, 3)),
    Case("64-heads", masks.causal(200), heads=(64, 8)),
]
CORNER = [
    Case("one-query", masks.full(1, 300)),
    Case("one-key", masks.full(300, 1)),
    Case("nothing-visible", slices_mask([], 100, 200)),
    Case("empty-rows-and-keys", slices_mask([(10, 100, 20, 300, -79, 289)], 600, 800)),
    Case("one-cell", slices_mask([(70, 71, 130, 131, 60, 60)], 200, 200)),
    Case("square-bi-causal", slices_mask([(0, 200, 0, 200, 0, 0)], 200, 200)),
    Case("one-query-hd256", masks.full(1, 300), head_dim=256),
    Case("one-key-hd256", masks.full(300, 1), head_dim=256),
    Case("nothing-visible-hd256", slices_mask([], 100, 200), head_dim=256),
    Case("one-cell-hd256", slices_mask([(70, 71, 130, 131, 60, 60)], 200, 200), head_dim=256),
    Case("one-query-hd96", masks.full(1, 300), head_dim=96),
    Case("one-key-hd96", masks.full(300, 1), head_dim=96),
    Case("nothing-visible-hd96", slices_mask([], 100, 200), head_dim=96),
    Case("one-cell-hd96", slices_mask([(70, 71, 130, 131, 60, 60)], 200, 200), head_dim=96),
]
# The tensor cores add lse / softmax_scale to the scores: large, tiny and wildly different sizes.
SCALES = [
    Case(f"{name}-scale-{scale}-q-{magnitude}", docs(200, 130), dtype=dtype, scale=scale,
         magnitude=magnitude)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    for scale, magnitude in ((1e-6, 1.0), (1e-3, 100.0), (1e-2, 1.0), (1.0, 1.0), (0.5, 4.0))
]  # fmt: skip
# Of scores of about 1: almost linear, and far in the bend.
CAPPED = [
    replace(case, name=f"{case.name}-softcap-{softcap}", softcap=softcap)
    for case in (
        *REGULAR[1:],
        *(case for case in IRREGULAR if case.name.startswith(("documents", "strided", "group"))),
        CORNER[3],
    )
    for softcap in (30.0, 0.7)
]
# The ways to compute a tanh, by the size of scores beside the cap: all small, most small, most
# beyond the cap.
CAPPED += [
    replace(case, name=f"{case.name}-softcap-{softcap}-q-{size}", softcap=softcap,
            magnitude=size * softcap)
    for case in (*REGULAR[1:7], IRREGULAR[2], IRREGULAR[7], IRREGULAR[12])
    for softcap in (50.0,)
    for size in (0.15, 0.4, 1.0, 4.0)
]  # fmt: skip
CASES = REGULAR + IRREGULAR + CORNER + SCALES + CAPPED
