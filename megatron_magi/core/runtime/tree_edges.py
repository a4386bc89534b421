"""The tokens of a tree and the rows that predict them, on one context-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_magi.checks import instance
from megatron_magi.core.comm.process_group import CpGroup, group_rank, resolve_group
from megatron_magi.core.mask.tree import PrefixTree
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.plan.attn_plan import check_plan
from megatron_magi.core.runtime.rank_sum import sum_over_ranks
from megatron_magi.core.tensor_checks import device as checked_device
from megatron_magi.core.tensor_checks import on_host, tensor


def integer_tensor(value: Any, name: str) -> None:
    """Require a dense tensor of integers."""
    tensor(value, name)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {value.dtype}; pass int64")
    if value.is_meta or value.layout is not torch.strided:
        on_host(value, name)  # which refuses it


@dataclass(frozen=True)
class TreeEdges:
    """The predictions of a rank: every token of a tree is predicted on exactly one rank."""

    sources: Tensor
    """int64 [edges]: local rows whose logits predict."""
    targets: Tensor
    """int64 [edges]: rows of the whole stream that they predict."""

    def __post_init__(self) -> None:
        for name in ("sources", "targets"):
            integer_tensor(getattr(self, name), name)

    def logprobs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """fp32 [edges]: log-probability of each predicted token; differentiable.

        Args:
            logits: [local rows, vocabulary], any floating dtype.
            tokens: int64 [rows], the token ids of the whole stream.

        Raises:
            TypeError: no tensors, or tokens that are no integers.
        """
        tensor(logits, "logits")
        integer_tensor(tokens, "tokens")
        rows = logits[self.sources].float()
        chosen = rows.gather(1, tokens.to(rows.device)[self.targets][:, None])[:, 0]
        return chosen - rows.logsumexp(dim=1)


def tree_edges(
    tree: PrefixTree, plan: AttnPlan, cp_group: CpGroup, device: torch.device | str = "cpu"
) -> TreeEdges:
    """The predictions whose logits this rank has.

    Args:
        tree: the tree that the plan's mask was made of.
        plan: the plan that tokens are dispatched by.
        cp_group: the context-parallel group, or None for one rank.
        device: of the indices.

    Raises:
        TypeError: no tree, plan, group or device.
        ValueError: a plan of another number of rows, or no such device.

    Cost: no communication.
    """
    instance(tree, PrefixTree, "tree", "pass a PrefixTree")
    check_plan(plan)
    place = checked_device(device)
    resolve_group(cp_group)
    if plan.layout.total_seqlen != tree.total_seqlen:
        raise ValueError(
            f"tree_edges needs the plan of the tree's {tree.total_seqlen} rows, got one of "
            f"{plan.layout.total_seqlen}; plan tree.mask()"
        )
    owned = plan.layout.position_ids(group_rank(cp_group))
    local = np.full(plan.layout.padded_seqlen, -1, np.int64)
    local[owned] = np.arange(len(owned))
    before = tree.predecessors()
    sources = np.where(before >= 0, local[before], -1)
    targets = np.flatnonzero(sources >= 0)
    return TreeEdges(
        torch.from_numpy(sources[targets]).to(place), torch.from_numpy(targets).to(place)
    )


def sum_by_branch(values: Tensor, edges: TreeEdges, tree: PrefixTree, cp_group: CpGroup) -> Tensor:
    """Sum values of tokens over every sequence of a tree, on all ranks; differentiable.

    Args:
        values: floating [edges], such as log-probabilities times weights.
        edges: those of this rank.
        tree: their tree.
        cp_group: the context-parallel group, or None for one rank.

    Returns:
        [branches], in the order of `tree.branches()`, equal on every rank. A gradient of it flows
        to this rank's values alone: the gradients of parameters are then each rank's share, to be
        summed over the group as those of any loss.

    Raises:
        TypeError: values that are no tensor, no edges, tree or group.

    Cost: an all-reduce of one number for each branch.
    """
    tensor(values, "values")
    instance(edges, TreeEdges, "edges", "pass what tree_edges returns")
    instance(tree, PrefixTree, "tree", "pass a PrefixTree")
    resolve_group(cp_group)
    of_node = torch.zeros(len(tree.parents), dtype=values.dtype, device=values.device)
    nodes = torch.from_numpy(np.repeat(np.arange(len(tree.parents)), tree.node_lengths))
    of_node = of_node.index_add(0, nodes.to(values.device)[edges.targets], values)
    member = _membership(tree.branches(), len(tree.parents)).to(values)
    return sum_over_ranks(member @ of_node, cp_group)


def _membership(branches: Sequence[Sequence[int]], num_nodes: int) -> Tensor:
    """[branches, nodes]: 1 where a sequence has the node."""
    member = torch.zeros(len(branches), num_nodes)
    for row, nodes in zip(member, branches, strict=True):
        row[list(nodes)] = 1
    return member
