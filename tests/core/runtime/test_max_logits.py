"""The largest score of every head over ranks, against the dense scores of one process."""

from __future__ import annotations

import pytest
import torch

from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.core.plan import make_attn_plan
from megatron_magi.core.runtime.max_logits import dist_max_logits
from tests.core.runtime import token_jobs as jobs
from tests.process_pool import pool


@pytest.mark.parametrize("cp_size", [2, 3])
def test_every_rank_has_the_largest_of_all(cp_size: int) -> None:
    pool(5).run(jobs.largest_scores, cp_size)


def test_one_process_without_a_group() -> None:
    mask = masks.causal(40)
    plan = make_attn_plan(mask, 1, HeadShape(2, 1, 4), MagiConfig())
    q, k = torch.randn(40, 2, 4), torch.randn(40, 1, 4)
    got = dist_max_logits(q, k, plan, None, 0.7)
    torch.testing.assert_close(got, jobs.dense_largest(q, k, mask, 0.7))
