"""Distributed attention over gloo against the dense answer of one process."""

from itertools import product

import pytest
import torch

import megatron_magi as magi
from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.core.plan import make_attn_plan
from megatron_magi.core.runtime import dist_attn, staged_backward
from megatron_magi.core.runtime.stage_context import Qkv
from tests.core.runtime import buffer_jobs, gradient_jobs
from tests.core.runtime import runtime_jobs as jobs
from tests.process_pool import ProcessPool, pool

WORLD = 5


@pytest.mark.parametrize(
    "cp_size, degree", [(1, None), *product((2, 3, 5), (0, 1, 3, None, "local_first", "at_once"))]
)
def test_any_legal_mask(cp_size: int, degree: int | str | None) -> None:
    first = 1000 * cp_size + 100 * (degree if isinstance(degree, int) else 7)
    pool(WORLD).run(jobs.random_masks, cp_size, jobs.staged(degree), list(range(first, first + 9)))


@pytest.mark.parametrize("name", jobs.NAMED)
@pytest.mark.parametrize("cp_size, degree", [(3, 2), (5, "local_first")])
def test_named_masks(name: str, cp_size: int, degree: int | str | None) -> None:
    pool(WORLD).run(jobs.named_mask, cp_size, jobs.staged(degree), name, torch.float64)


@pytest.mark.parametrize("cp_size, degree", [(2, 0), (3, 2)])
def test_capped_logits(cp_size: int, degree: int) -> None:
    pool(WORLD).run(jobs.capped_logits, cp_size, degree)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    "cp_size, degree", [(1, None), *product((3,), (0, 3, "local_first", "at_once"))]
)
def test_sinks_join_every_row_once(cp_size: int, degree: int | str | None, per_token: bool) -> None:
    pool(WORLD).run(jobs.sinks_on_every_stage, cp_size, degree, per_token)


def test_a_gradient_of_sinks_alone_is_a_backward_on_every_rank() -> None:
    """And ranks that do not all want it are told so."""
    plan = make_attn_plan(masks.causal(20), 1, HeadShape(2, 1, 4), MagiConfig())
    q, k = torch.randn(20, 2, 4), torch.randn(20, 1, 4)
    numbers = (0.5, 0.0)
    for needs in (False, True):
        sink = torch.zeros(1, 2, requires_grad=needs)
        assert dist_attn._call("dist_attn", Qkv(q, k, k), sink[0], *numbers).extra == needs | 0b10
        out, lse = magi.dist_attn(q, k, k, plan, None, magi.Softmax(sink=sink))
        assert out.requires_grad == lse.requires_grad == needs
    (got,) = torch.autograd.grad(out.sum(), sink)
    assert (got != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_one_process(dtype: torch.dtype) -> None:
    pool(WORLD).run(jobs.named_mask, 4, jobs.staged(2), "packed", dtype)


@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cp_size, degree", [(2, 0), (5, 2)])
@pytest.mark.parametrize("name", ["causal", "shared question"])
def test_partial_gradients_on_the_wire(
    name: str, cp_size: int, degree: int, dtype: torch.dtype, in_fp32: bool
) -> None:
    pool(WORLD).run(jobs.wire_dtype, cp_size, name, degree, dtype, in_fp32)


@pytest.mark.parametrize("cp_size", [2, 3])
def test_groups_of_heads_with_masks_of_their_own(cp_size: int) -> None:
    pool(WORLD).run(jobs.mask_per_head_group, cp_size)


def test_two_runs_give_equal_bits() -> None:
    pool(WORLD).run(jobs.equal_bits, 4)


@pytest.mark.parametrize("degree", [0, 1, None])
def test_gradients_do_not_keep_receive_buffers(degree: int) -> None:
    pool(WORLD).run(buffer_jobs.gradient_memory, 4, degree)


def test_odd_strides() -> None:
    pool(WORLD).run(buffer_jobs.odd_strides, 2)


def test_gradient_of_lse() -> None:
    pool(WORLD).run(jobs.gradient_of_lse, 3)


@pytest.mark.parametrize("cp_size, length", [(1, 9), (2, 9), (3, 32), (5, 3), (5, 101)])
def test_dispatch_then_undispatch_is_the_identity(cp_size: int, length: int) -> None:
    pool(WORLD).run(jobs.dispatch_round_trip, cp_size, length)


@pytest.mark.parametrize("cp_size", [2, 3, 5])
def test_group_cast_and_reduce(cp_size: int) -> None:
    pool(WORLD).run(jobs.cast_and_reduce, cp_size)


@pytest.mark.parametrize("what", ["mask", "config"])
def test_disagreement_is_an_error_on_every_rank(what: str) -> None:
    errors = pool(WORLD).run(jobs.ranks_disagree, 3, what, timeout_s=60)[:3]
    for rank, error in enumerate(errors):
        assert "ranks [1] differ from rank 0" in error and f"seen by rank {rank}" in error
        assert what in error


def test_an_absent_rank_is_an_error_within_seconds() -> None:
    workers = ProcessPool(2)
    try:
        for num_batches in (0, 2):
            stayed, left = workers.run(jobs.absent_rank, num_batches, timeout_s=60)
            assert left == "left" and "did not come" in stayed and "2 s" in stayed
    finally:
        workers.stop()


def test_a_rank_with_a_cached_plan_meets_one_without() -> None:
    pool(WORLD).run(jobs.cache_hit_meets_miss, 3)


SHAPE = HeadShape(2, 1, 4)


def test_one_rank_needs_no_process_group() -> None:
    mask = masks.from_cu_seqlens([0, 5, 12])
    jobs.check_against_dense(mask, MagiConfig(), None, torch.float64, 0)
    plan = magi.plan(mask, 1, SHAPE)
    x = torch.randn(12, 2, 4)
    assert torch.equal(magi.undispatch(magi.dispatch(x, plan, None), plan, None), x)


def test_wrong_sizes_are_refused() -> None:
    plan = magi.plan(masks.causal(12), 1, SHAPE)
    with pytest.raises(ValueError, match=r"the full sequence \(12 tokens\), got shape \[11, 2\]"):
        magi.dispatch(torch.zeros(11, 2), plan, None)
    with pytest.raises(ValueError, match="dimension 3 must hold"):
        magi.undispatch(torch.zeros(12, 2), plan, None, dim=3)
    with pytest.raises(ValueError, match="this rank's 12 tokens, got 10"):
        x = torch.zeros(10, 2, 4)
        magi.dist_attn(x, x, x, plan, None)
    with pytest.raises(ValueError, match="for 2 context-parallel ranks, got a group of 1"):
        magi.dispatch(torch.zeros(12, 2), magi.plan(masks.causal(12), 2, SHAPE), None)


def test_a_call_is_checked_whatever_was_accepted_before() -> None:
    plan = magi.plan(masks.causal(12), 1, SHAPE)
    q, k = torch.randn(12, 2, 4), torch.randn(12, 1, 4)
    out, _ = magi.dist_attn(q, k, k, plan, None)
    again, _ = magi.dist_attn(torch.nn.Parameter(q), k, k, plan, None)
    assert torch.equal(out, again)
    refused = {
        "share q's dtype": (q, k.double(), k),
        "on q's device": (q, k.to("meta"), k),
        "contiguous in head_dim": (q, k, torch.randn(12, 1, 8)[..., ::2]),
        "this rank's 12 tokens, got 11": (q[1:], k, k),
        "heads that were planned": (q, k.repeat(1, 2, 1), k.repeat(1, 2, 1)),
        r"must be \[tokens, heads, head_dim\]": (q, k[0, 0, 0], k),
        "k must be a Tensor": (q, None, k),
    }
    for words, tensors in refused.items():
        with pytest.raises((TypeError, ValueError), match=words):
            magi.dist_attn(*tensors, plan, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("degree", [0, 2, "local_first"])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_tensors_without_memory_have_shapes_and_dtypes(cp_size: int, degree: int | str) -> None:
    """On torch's device "meta": what comes out is described, forward and backward."""
    pool(WORLD).run(jobs.shapes_alone, cp_size, degree)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_that_stay_are_made_in_their_dtype(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel call on one rank: no fp32 buffers. Sums over stages are in fp32, see below."""
    asked = []

    class Recorded(staged_backward.KeyGradients):
        def __init__(self, work: object, k: object, v: object, dtype: torch.dtype) -> None:
            asked.append(dtype)
            super().__init__(work, k, v, dtype)  # type: ignore[arg-type]

    monkeypatch.setattr(staged_backward, "KeyGradients", Recorded)
    plan = magi.plan(masks.causal(16), 1, HeadShape(2, 1, 4))
    q, k = (torch.randn(16, h, 4, dtype=dtype, requires_grad=True) for h in (2, 1))
    magi.dist_attn(q, k, k, plan, None)[0].sum().backward()
    assert asked == [dtype] and q.grad is not None and q.grad.dtype == dtype


def test_sums_over_ranks_are_made_in_fp32() -> None:
    pool(5).run(gradient_jobs.dtype_of_sums, 2)
