"""The largest score of every head over ranks, against the dense scores of one process."""

from __future__ import annotations

import pytest
import torch

from megatron_magi import AttnMask, HeadShape, MagiConfig, Softmax, masks
from megatron_magi.core.plan import make_attn_plan
from megatron_magi.core.runtime.dist_attn import dist_attn_and_max_logits
from tests.core.runtime import token_jobs as jobs
from tests.process_pool import pool


@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize("cp_size", [2, 3])
def test_every_rank_has_the_largest_of_all(cp_size: int, degree: int) -> None:
    pool(5).run(jobs.largest_scores, cp_size, degree)


def test_one_process_without_a_group() -> None:
    mask = masks.causal(40)
    plan = make_attn_plan(mask, 1, HeadShape(2, 1, 4), MagiConfig())
    q, k, v = torch.randn(40, 2, 4), torch.randn(40, 1, 4), torch.randn(40, 1, 4)
    most = dist_attn_and_max_logits(q, k, v, plan, None, Softmax(0.7))[2]
    torch.testing.assert_close(most, jobs.dense_largest(q, k, mask, 0.7))


def test_nothing_visible_has_no_largest() -> None:
    plan = make_attn_plan(AttnMask([], 12, 12), 1, HeadShape(2, 1, 4), MagiConfig())
    q, k = torch.randn(12, 2, 4), torch.randn(12, 1, 4)
    assert (dist_attn_and_max_logits(q, k, k, plan, None)[2] == -torch.inf).all()
