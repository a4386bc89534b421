"""Under torch.compile the functions on a plan are one graph break, and right."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

import megatron_magi as magi
from megatron_magi import HeadShape, masks
from megatron_magi import magi_attention as api

MASK = masks.from_cu_seqlens([0, 5, 12])
PLAN = magi.plan(MASK, 1, HeadShape(4, 2, 8))
KEY = api.magi_attn_varlen_key([0, 5, 12], [0, 5, 12], 4, 2, 8, 0, None, causal=True)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return magi.dist_attn(q * 2, k, v, PLAN, None)[0].sin()


def new_plan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As a loop does with every batch: the planner itself runs between the graphs."""
    plan = magi.plan(masks.causal(len(q)), 1, HeadShape(4, 2, 8))
    return magi.dist_attn(q * 2, k, v, plan, None)[0].sin()


def published(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return api.calc_attn(q * 2, k, v, KEY)[0].sin()


def tokens_there_and_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    local = magi.dispatch(q * 2, PLAN, None).cos()
    shifted = magi.shift_tokens(local, 1, PLAN, None).sin()
    return magi.undispatch(shifted, PLAN, None) * k.sum() * v.sum()


Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs() -> list[Tensor]:
    torch.manual_seed(3)
    shapes = ((12, 4, 8), (12, 2, 8), (12, 2, 8))
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


CASES = [(attention, 2), (new_plan, 2), (published, 2), (tokens_there_and_back, 4)]
"""Steps, and the graphs they come to: one before each call and one behind the last."""


@pytest.mark.parametrize("step, graphs", CASES)
def test_compiled_equals_uncompiled(step: Step, graphs: int) -> None:
    qkv = inputs()
    want = step(*qkv)
    want_grads = torch.autograd.grad(want.sum(), qkv)
    counter = CompileCounterWithBackend("aot_eager")
    got = torch.compile(step, backend=counter)(*qkv)
    assert torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got.sum(), qkv), want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
    assert counter.frame_count == graphs


def test_many_plans_do_not_use_up_the_recompilations() -> None:
    """A frame that is compiled too often runs as it is, and what it calls is compiled instead."""
    plans = [magi.plan(masks.causal(12 + i), 1, HeadShape(4, 4, 8)) for i in range(10)]

    def step(q: Tensor, plan: magi.AttnPlan) -> Tensor:
        return magi.dist_attn(q * 2, q, q, plan, None)[0].sin()

    compiled = torch.compile(step, backend="eager")
    for i, plan in enumerate(plans):
        q = torch.randn(12 + i, 4, 8, dtype=torch.float64)
        assert torch.equal(compiled(q[:, :4], plan), step(q[:, :4], plan))


def test_a_whole_graph_is_refused_in_torchs_words() -> None:
    with pytest.raises(Unsupported, match="dist_attn"):
        torch.compile(attention, backend="eager", fullgraph=True)(*inputs())


def test_the_compiler_is_imported_by_those_who_compile() -> None:
    """It takes longer than importing everything else."""
    program = """
import sys, torch, megatron_magi as magi
plan = magi.plan(magi.masks.causal(4), 1, magi.HeadShape(1, 1, 8))
q = magi.dispatch(torch.zeros(4, 1, 8), plan, None)
magi.undispatch(magi.dist_attn(q, q, q, plan, None)[0], plan, None)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
