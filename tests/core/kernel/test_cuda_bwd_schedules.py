"""The Hopper backward by the schedule of its blocks: splits of a head group, lanes of a section."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from megatron_magi import masks
from tests.core.kernel.cuda_bwd_cases import Case, docs
from tests.core.kernel.test_cuda_bwd import HOPPER, Run
from tests.core.kernel.test_cuda_bwd import _backward as backward_of
from tests.core.kernel.test_cuda_bwd import _table as table_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_split_groups_give_gradients_in_the_dtype_of_q(head_dim: int) -> None:
    """Few keys and many query heads: the parts of a head group are added by another kernel."""
    from megatron_magi.core.kernel.hopper.choice import backward_launch
    from megatron_magi.core.kernel.hopper.launch import HeadsKey

    run = Run(Case("split", masks.causal(1000), heads=(64, 4), head_dim=head_dim))
    key = HeadsKey.of(run.call)
    for deterministic in (False, True):
        assert backward_launch(run.call.table, key, deterministic).params.num_splits > 1
        run.check(backward_of(run, deterministic=deterministic, dtype=torch.bfloat16))


def _scheduled(run: Run, splits: int, lanes: int) -> Run:
    """The same call with another schedule of its list, in fast mode."""
    from megatron_magi.core.kernel.hopper.choice import backward_launch, scratch_at
    from megatron_magi.core.kernel.hopper.launch import HeadsKey
    from megatron_magi.core.plan.travel import NO_TRAVEL

    key, table, num_keys = HeadsKey.of(run.call), table_of(run.case.mask), run.call.table.num_k
    chosen = backward_launch(run.call.table, key, False)
    params = type(chosen.params).from_buffer_copy(chosen.params)
    params.num_splits, params.lanes_per_section = splits, lanes
    made = dataclasses.replace(chosen, params=params, scratch_at=scratch_at(params))
    table.cache["bwd", key, False, num_keys, NO_TRAVEL] = made
    other = copy.copy(run)
    other.call = run.call._replace(table=table)
    return other


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_splits_of_a_head_may_run_one_after_another(head_dim: int) -> None:
    """A section has whole kv heads, or some lanes of one: the sums of keys are the same bits."""
    run = Run(Case("lanes", docs(700, 300, 24), heads=(16, 2), head_dim=head_dim))
    together = backward_of(_scheduled(run, 4, 8))
    for lanes in (1, 2, 4):
        apart = backward_of(_scheduled(run, 4, lanes))
        run.check(apart)
        assert all(map(torch.equal, apart[1:], together[1:])), lanes
