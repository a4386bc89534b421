"""Every token of a tree is predicted on one rank, by the row before it in its sequence."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import HeadShape, MagiConfig, PrefixTree, TreeEdges, sum_by_branch, tree_edges
from megatron_magi.core.plan import make_attn_plan
from megatron_magi.core.runtime import tree_edges as module
from tests.core.mask.test_tree import trees
from tests.process_pool import pool

HEADS = HeadShape(2, 1, 16)
TREE = PrefixTree((6, 5, 4, 3, 7), (-1, 0, 0, 1, 1))


@settings(deadline=None)  # the first example loads what plans need
@given(tree=trees(), cp_size=st.integers(1, 4))
def test_ranks_share_the_predictions(tree: PrefixTree, cp_size: int) -> None:
    plan = make_attn_plan(tree.mask(), cp_size, HEADS, MagiConfig())
    before, found = tree.predecessors(), []
    for rank in range(cp_size):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "group_rank", lambda group, rank=rank: rank)
            edges = tree_edges(tree, plan, None)
        rows = plan.layout.position_ids(rank)
        assert (rows[edges.sources] == before[edges.targets]).all()
        found += edges.targets.tolist()
    assert sorted(found) == np.flatnonzero(before >= 0).tolist()


def tokens_and_logits(requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 11, (TREE.total_seqlen,), generator=random)
    logits = torch.randn(TREE.total_seqlen, 11, generator=random)
    return tokens, logits.requires_grad_(requires_grad)


def sequence_logprob(nodes: list[int]) -> float:
    """Of one branch: each token's log-softmax at the row before it."""
    tokens, logits = tokens_and_logits()
    rows = TREE.rows_of(nodes)
    logs = logits.double().log_softmax(dim=1)
    return float(sum(logs[a, tokens[b]] for a, b in pairwise(rows)))


def sums_of_rank(rank: int) -> tuple[list[float], torch.Tensor, list[int]]:
    """(branch sums, this rank's gradient of logits, its rows), of weighted branches."""
    plan = make_attn_plan(TREE.mask(), 2, HEADS, MagiConfig(chunk_size=2))
    group = dist.group.WORLD
    rows = plan.layout.position_ids(rank)
    tokens, logits = tokens_and_logits()
    rows_held = np.minimum(rows, TREE.total_seqlen - 1)  # padding
    local = logits[rows_held].requires_grad_()
    edges = tree_edges(TREE, plan, group)
    sums = sum_by_branch(edges.logprobs(local, tokens), edges, TREE, group)
    (sums * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    return sums.tolist(), local.grad, rows.tolist()


def test_sums_and_gradients_of_two_ranks_are_those_of_the_sequences() -> None:
    wanted = [sequence_logprob(nodes) for nodes in TREE.branches()]
    tokens, logits = tokens_and_logits(requires_grad=True)
    logs = logits.log_softmax(dim=1)
    weighted = 0.0
    for weight, nodes in zip((1.0, 10.0, 100.0), TREE.branches(), strict=True):
        rows = TREE.rows_of(nodes)
        weighted = weighted + weight * logs[rows[:-1], tokens[rows[1:]]].sum()
    weighted.backward()
    for sums, grad, rows in pool(2).run(sums_of_rank):
        assert sums == pytest.approx(wanted, rel=1e-5)
        real = [i for i, row in enumerate(rows) if row < TREE.total_seqlen]
        torch.testing.assert_close(grad[real], logits.grad[[rows[i] for i in real]])


def test_another_plan_is_refused() -> None:
    plan = make_attn_plan(TREE.mask(), 1, HEADS, MagiConfig())
    with pytest.raises(ValueError, match="needs the plan of the tree's 6 rows, got one of 25"):
        tree_edges(PrefixTree.of_answers(3, [2, 1]), plan, None)
    edges = tree_edges(TREE, plan, None)
    assert isinstance(edges, TreeEdges) and len(edges.targets) == TREE.total_seqlen - 1
