"""Cross-attention over gloo, and queries that are sent to their keys, against one process."""

from itertools import product

import pytest
import torch

import megatron_magi as magi
from megatron_magi import AttnMask, HeadShape
from tests.core.runtime import cross_jobs as jobs
from tests.process_pool import pool

WORLD = 5


DEGREES = (0, 2, None, "local_first", "at_once")


@pytest.mark.parametrize(
    "cp_size, degree, sends",
    [(1, None, None), (1, None, False), (2, 2, None), *product((5,), DEGREES, (None, False))],
)
def test_any_legal_mask(cp_size: int, degree: int | str | None, sends: bool | None) -> None:
    first = 1000 * cp_size + 100 * (degree if isinstance(degree, int) else 7)
    seeds = list(range(first, first + 8))
    (queries, keys), *_ = pool(WORLD).run(jobs.random_masks, cp_size, seeds, degree, sends)
    assert (queries > 0) == (cp_size > 1 and sends is None)
    assert (keys > 0) == (cp_size > 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_one_process(dtype: torch.dtype) -> None:
    pool(WORLD).run(jobs.in_dtype, 4, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_query_at_an_odd_width(dtype: torch.dtype) -> None:
    pool(WORLD).run(jobs.one_query_at_an_odd_width, 3, dtype)


@pytest.mark.parametrize("degree", [0, 2, "local_first", "at_once"])
def test_relays_of_keys(degree: int | str) -> None:
    pool(WORLD).run(jobs.relays_of_keys, 4, degree)


@pytest.mark.parametrize("deterministic", [False, True])
def test_self_attention_on_contiguous_homes(deterministic: bool) -> None:
    pool(WORLD).run(jobs.self_attention, 4, deterministic)


def test_sinks_the_gradient_of_lse_and_the_largest_logits() -> None:
    pool(WORLD).run(jobs.sinks_lse_and_largest_logits, 4)


@pytest.mark.parametrize("cp_size", [1, 3])
def test_keys_go_out_and_come_back(cp_size: int) -> None:
    pool(WORLD).run(jobs.keys_go_out_and_come_back, cp_size)


def test_keys_of_another_length_are_refused() -> None:
    mask = AttnMask([[0, 4, 0, 12, -99, 99]], 4, 12)
    plan = magi.plan(mask, 1, HeadShape(4, 2, 8))
    q, k = torch.zeros(4, 4, 8), torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="k must hold this rank's 12 tokens, got 4"):
        magi.dist_attn(q, k, k, plan, None)
