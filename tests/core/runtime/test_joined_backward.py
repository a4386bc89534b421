"""The backward in one call: gradients against fp64, whatever the ranks' streams do when.

All ranks are in one process, with the stand-in of tests/core/comm/queued_ranks.py for streams
and copies. The kernel is a stand-in too: it waits, computes and tells as the real one does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_magi import AttnMask, HeadShape, MagiConfig, flex_flash_attn_func
from megatron_magi.core.comm import group_reduce
from megatron_magi.core.kernel.backend import AttnCall, GradCall, Pair, less_dlse
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.kernel.widths import Widths
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.plan.attn_plan import make_attn_plan
from megatron_magi.core.plan.rank_plan import joined_stage
from megatron_magi.core.plan.travel import Travel
from megatron_magi.core.runtime import joined_backward as module
from megatron_magi.core.runtime import prepared
from megatron_magi.core.runtime.joined_backward import joined_backward, may_join
from megatron_magi.core.runtime.prepared import PreparedPlan, PreparedStage, prepared_for
from megatron_magi.core.runtime.stage_work import StageWork
from tests.core.comm.queued_ranks import Ranks, flag, raise_word
from tests.dense import random_mask

HEADS, CPU = HeadShape(4, 2, 8), torch.device("cpu")
SCALE = HEADS.head_dim**-0.5
TRAVEL = Travel(30, 60)
NAN = float("nan")


class Kernel:
    """The backend of one rank: what a call asks for runs when the rank's stream gets there."""

    name = "stand-in"
    adds_atomically = False

    def __init__(self, ranks: Ranks, count: int) -> None:
        self.ranks, self.count, self.exact = ranks, count, ReferenceBackend()
        self.stream = ranks.current

    def takes_received(self, widths: Widths) -> bool:
        return True

    def done_count(self, call: AttnCall, deterministic: bool) -> int:
        return self.count

    def delta(self, out: Tensor, dout: Tensor, dtype: torch.dtype) -> Tensor:
        return self.exact.delta(out, dout, dtype)

    def backward(self, call: AttnCall, grad: GradCall) -> tuple[Tensor, Tensor, Tensor]:
        received, own, theirs = call.received, grad.dkv, grad.received_dkv
        assert received is not None and received.arrival is not None
        assert received.travel == TRAVEL
        assert own is not None and theirs is not None and grad.done is not None
        word, number = received.arrival
        dq = torch.full_like(call.q, NAN)
        made: list[Tensor] = []

        def compute() -> None:
            keys, values = (torch.cat(pair) for pair in zip(call[1:3], received[:2], strict=True))
            asked = call._replace(k=keys, v=values, received=None)
            plain = grad._replace(dkv=None, received_dkv=None, done=None)
            made.extend(self.exact.backward(asked, plain))

        def write(part: int) -> None:
            for target, value in zip(theirs, made[1:], strict=True):
                rows = slice(part, None, max(self.count, 1))
                target[rows] = value[len(call.k) :][rows]

        def finish() -> None:
            put((dq, *own), [made[0], *(x[: len(call.k)] for x in made[1:])])

        add, done = self.ranks.streams.add, grad.done
        add(self.stream, lambda: None, lambda: flag(word).value >= number)
        self.work()
        add(self.stream, compute)
        for part in range(max(self.count, 1)):
            self.work()
            add(self.stream, partial(write, part))
            if self.count:
                add(self.stream, lambda: raise_word(done))
        self.work()
        add(self.stream, finish)
        return dq, *own

    def work(self) -> None:
        """Time in which others may come too early."""
        for _ in range(12):
            self.ranks.streams.add(self.stream, lambda: None)


def put(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def joined(plan: AttnPlan, rank: int) -> PreparedPlan | None:
    """What a GPU would hold of the plan."""
    ready = prepared_for(plan, rank, CPU)
    stage = joined_stage(plan.mask, plan.layout, plan.rank_plan(rank))
    if stage is None:
        return None
    table = SliceTable(stage.slices, stage.num_keys - stage.cast.num_recv, stage.num_keys)
    cast = next(s.cast for s in ready.backward if s.cast is not None)
    seen = len(stage.slices) > 0
    both = PreparedStage(table, cast, stage.num_own, seen)
    return replace(ready, joined=both, travel=TRAVEL)


class Whole:
    """The sequence on one device, in fp64: inputs, result and gradients."""

    def __init__(self, mask: AttnMask, seed: int, with_lse: bool) -> None:
        gen = torch.Generator().manual_seed(seed)
        total = mask.total_seqlen_q
        shapes = [(total, heads, HEADS.head_dim) for heads in (4, 2, 2, 4)]
        *qkv, self.dout = (torch.randn(shape, generator=gen).double() for shape in shapes)
        self.qkv = [x.requires_grad_() for x in qkv]
        out, meta = flex_flash_attn_func(*self.qkv, slices=mask)
        self.dlse = torch.randn(total, 4, generator=gen).double() if with_lse else None
        lse = torch.where(meta.lse.isinf(), 0.0, meta.lse)
        loss = (out * self.dout).sum() + (0 if self.dlse is None else (lse * self.dlse).sum())
        self.grads = torch.autograd.grad(loss, self.qkv)
        self.result: Pair = out.detach(), meta.lse.detach()

    def of(self, plan: AttnPlan, rank: int, *xs: Tensor | None) -> list[Any]:
        """A rank's rows, in fp32."""
        rows = torch.cat([torch.arange(a, b) for a, b in plan.layout.local_ranges(rank).tolist()])
        picked = [None if x is None else x.detach()[rows].float() for x in xs]
        padding = plan.layout.num_local_tokens - len(rows)
        return [
            None if x is None else torch.cat([x, x.new_zeros(padding, *x.shape[1:])])
            for x in picked
        ]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(0, 3), st.booleans(), st.integers(0, 10**6))
def test_gradients_in_any_order_of_events(
    count: int, done_count: int, with_lse: bool, seed: int
) -> None:
    """The kernel tells in ``done_count`` steps that gradients lie written; 0: it does not."""
    mask = random_mask(seed, 96, 96)
    plan = make_attn_plan(mask, count, HEADS, MagiConfig(overlap_degree=1, chunk_size=8))
    if len(plan.transfers) == 0:
        return
    whole = Whole(mask, seed, with_lse)
    with pytest.MonkeyPatch.context() as patch:
        ranks = Ranks(count, patch, slot_rows=512)
        patch.setattr(module, "add_partials", in_turn(ranks))
        results = []
        for _ in range(2):  # layers
            for ranks.rank in range(count):
                results.append(run(ranks, plan, whole, done_count))
        ranks.streams.run(random.Random(seed))
    for rank, grads in enumerate(results):
        rank %= count
        real = int(
            (plan.layout.local_ranges(rank)[:, 1] - plan.layout.local_ranges(rank)[:, 0]).sum()
        )
        for got, want in zip(grads, whole.of(plan, rank, *whole.grads), strict=True):
            torch.testing.assert_close(got[:real], want[:real], rtol=1e-4, atol=1e-4)


def run(ranks: Ranks, plan: AttnPlan, whole: Whole, done_count: int) -> tuple[Tensor, ...]:
    """One rank's backward, as far as the host goes."""
    rank = ranks.rank
    ready = joined(plan, rank)
    assert ready is not None
    engine, kernel = ranks.engines[rank], Kernel(ranks, done_count)
    work = StageWork(plan, ready, None, engine, kernel, SCALE, 0.0, torch.float32, None)  # type: ignore[arg-type]
    q, k, v, out, lse, dout, dlse = whole.of(
        plan, rank, *whole.qkv, *whole.result, whole.dout, whole.dlse
    )
    assert may_join(work, q, v)
    delta = None if dlse is None else less_dlse(kernel.delta(out, dout, lse.dtype), dlse)
    return joined_backward(work, (q, k, v), (out, lse), (dout, delta))


def in_turn(ranks: Ranks) -> Any:
    """``add_partials`` on the rank's stream."""

    def add_partials(own: Pair, arriving: Any, dtype: torch.dtype) -> list[Tensor]:
        (reduce,) = arriving
        reduce.work.wait()  # the stream's wait, which belongs before the addition
        here = replace(reduce, work=None)
        sums = [torch.full_like(x, NAN) for x in own]
        ranks.streams.add(
            ranks.current, lambda: put(sums, group_reduce.add_partials(own, [here], dtype))
        )
        return sums

    return add_partials


def test_a_plan_of_other_stages_is_not_joined() -> None:
    mask = random_mask(3, 96, 96)
    for config in (
        MagiConfig(overlap_degree=0, chunk_size=8), MagiConfig(overlap_degree=2, chunk_size=8),
        MagiConfig(overlap_degree=1, chunk_size=8, transport="all_to_all"),
    ):  # fmt: skip
        plan = make_attn_plan(mask, 2, HEADS, config)
        assert len(plan.transfers) and joined_stage(mask, plan.layout, plan.rank_plan(0)) is None


def test_keys_of_the_joined_stage_are_those_of_both_stages() -> None:
    mask = random_mask(5, 128, 128)
    plan = make_attn_plan(mask, 2, HEADS, MagiConfig(overlap_degree=1, chunk_size=8))
    for rank in range(2):
        view = plan.rank_plan(rank)
        stage = joined_stage(mask, plan.layout, view)
        assert stage is not None and stage.cast is view.stages[1].cast
        assert stage.num_own == view.stages[0].num_keys == plan.layout.num_local_tokens
        area = sum(
            AttnMask(s.slices, plan.layout.num_local_tokens, s.num_keys).area() for s in view.stages
        )
        assert AttnMask(stage.slices, plan.layout.num_local_tokens, stage.num_keys).area() == area


@pytest.mark.parametrize("transport", ["auto", "symm_mem", "all_to_all", "symm_mem_joined"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_one_transport_alone_joins_the_stages(transport: Any, device: str) -> None:
    config = MagiConfig(overlap_degree=1, chunk_size=8, transport=transport)
    plan = make_attn_plan(random_mask(5, 128, 128), 2, HEADS, config)
    assert len(plan.transfers)
    stage = prepared._joined(plan, plan.rank_plan(0), torch.device(device))
    assert (stage is not None) == (transport == "symm_mem_joined" and device == "cuda")
