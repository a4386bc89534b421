"""Distributed attention whose values are narrower or wider than its keys."""

from __future__ import annotations

import pytest
import torch

from megatron_magi import HeadShape
from tests.core.runtime import value_width_jobs as jobs
from tests.core.runtime.runtime_jobs import named_mask, random_masks, staged
from tests.process_pool import pool

WORLD = 5
SHAPES = {
    "narrower values": HeadShape(4, 2, 12, head_dim_v=8),
    "wider values": HeadShape(3, 3, 4, head_dim_v=10),
    "one head, one element": HeadShape(2, 1, 6, head_dim_v=1),
}
LATENT = HeadShape(4, 4, 24, head_dim_v=16)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [0, 2, None, "local_first"])
@pytest.mark.parametrize("cp_size", [2, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_any_legal_mask(name: str, cp_size: int, degree: int | str | None) -> None:
    first = 900 * cp_size + 100 * (degree if isinstance(degree, int) else 7)
    seeds = list(range(first, first + 8))
    pool(WORLD).run(random_masks, cp_size, staged(degree), seeds, SHAPES[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_one_process(dtype: torch.dtype) -> None:
    pool(WORLD).run(named_mask, 4, staged(2), "packed", dtype, LATENT)


@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("degree", [0, 2, "local_first"])
@pytest.mark.parametrize("cp_size", [2, 3])
def test_no_byte_beyond_both_widths_travels(cp_size: int, degree: int | str, in_fp32: bool) -> None:
    pool(WORLD).run(jobs.bytes_on_the_wire, cp_size, LATENT, degree, in_fp32)
