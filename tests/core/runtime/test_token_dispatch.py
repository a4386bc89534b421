"""Dispatch, undispatch and agreement: what autograd, dtypes and errors ask of them."""

import pytest
import torch

import megatron_magi as magi
from megatron_magi import HeadShape, masks
from tests.core.runtime import token_jobs as jobs
from tests.process_pool import pool

WORLD = 5


@pytest.mark.parametrize("cp_size", [2, 3])
def test_partial_gradients_are_summed_in_a_copy(cp_size: int) -> None:
    pool(WORLD).run(jobs.partial_gradients_are_summed_in_a_copy, cp_size)


@pytest.mark.parametrize("cp_size", [2, 3])
def test_rows_of_padding_have_no_gradient(cp_size: int) -> None:
    pool(WORLD).run(jobs.padding_has_no_gradient, cp_size)


@pytest.mark.parametrize("cp_size", [1, 3])
def test_any_dtype_comes_back(cp_size: int) -> None:
    pool(WORLD).run(jobs.any_dtype, cp_size)


def test_gradients_in_fp8_come_back() -> None:
    pool(WORLD).run(jobs.gradients_in_fp8, 3)


def test_the_default_device_changes_nothing() -> None:
    pool(WORLD).run(jobs.other_default_device, 3, timeout_s=60)


def test_lazy_bits_are_resolved() -> None:
    pool(WORLD).run(jobs.lazy_bits, 2)


def test_second_derivatives_are_refused_on_every_rank() -> None:
    for error in pool(WORLD).run(jobs.second_derivatives, 2, timeout_s=60)[:2]:
        assert "can be differentiated once" in error


def test_nothing_stale_is_left_after_a_disagreement() -> None:
    pool(WORLD).run(jobs.after_a_disagreement, 3, timeout_s=60)


def test_ranks_with_other_second_masks_are_told() -> None:
    for error in pool(WORLD).run(jobs.other_second_masks, 3, timeout_s=60)[:3]:
        assert "ranks [1] differ from rank 0 in mask" in error


def test_comparisons_without_rows_are_finished_on_every_rank() -> None:
    for said in pool(WORLD).run(jobs.later_comparisons, 3, timeout_s=60)[:3]:
        first, second = said
        assert first.startswith("stages must plan the same thing; ranks [1] differ from rank 0")
        assert second == "equal"


def test_positions_are_the_callers_own() -> None:
    plan = magi.plan(masks.causal(15), 1, HeadShape(2, 1, 4))
    with torch.inference_mode():
        magi.position_ids(plan, 0).add_(5)
    positions = magi.position_ids(plan, 0)
    assert positions.tolist() == list(range(15))
    torch.nn.Embedding(15, 2)(positions).sum().backward()
