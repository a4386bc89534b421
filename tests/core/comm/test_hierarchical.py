"""Distributed attention among several nodes of gloo ranks against the dense answer."""

from __future__ import annotations

import pytest
import torch

from tests.core.runtime import node_jobs as jobs
from tests.core.runtime.runtime_jobs import named_mask, random_masks, staged
from tests.process_pool import pool

WORLD = 8


@pytest.mark.slow
@pytest.mark.parametrize("degree", [0, 1, 3, None, "local_first", "at_once"])
@pytest.mark.parametrize("cp_size, per_node", [(4, 2), (8, 4), (6, 2)])
def test_any_legal_mask(cp_size: int, per_node: int, degree: int | str | None) -> None:
    config = staged(degree, ranks_per_node=per_node)
    first = 1000 * cp_size + 100 * (degree if isinstance(degree, int) else 7)
    pool(WORLD).run(random_masks, cp_size, config, list(range(first, first + 8)))


@pytest.mark.parametrize(
    "dtype, in_fp32", [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)]
)
@pytest.mark.parametrize("name", ["causal", "packed", "shared question"])
def test_named_masks(name: str, dtype: torch.dtype, in_fp32: bool) -> None:
    config = staged(2, ranks_per_node=4, dkv_reduce_in_fp32=in_fp32)
    pool(WORLD).run(named_mask, 8, config, name, dtype)


@pytest.mark.parametrize("degree", [2, "at_once", "local_first"])
@pytest.mark.parametrize("cp_size, per_node", [(4, 2), (8, 4)])
def test_each_link_carries_what_the_plan_says(
    cp_size: int, per_node: int, degree: int | str
) -> None:
    pool(WORLD).run(jobs.bytes_by_link, cp_size, per_node, degree)


def test_two_runs_give_equal_bits() -> None:
    pool(WORLD).run(jobs.equal_bits, 8, 4)


@pytest.mark.parametrize("degree", [2, "at_once"])
def test_a_node_of_one_rank_spreads_nothing(degree: int | str) -> None:
    pool(WORLD).run(jobs.alone_on_nodes, 3, degree)


def test_a_mesh_of_nodes_and_ranks() -> None:
    pool(WORLD).run(jobs.mesh_names_its_nodes, WORLD)


def test_ranks_that_see_other_nodes_are_told() -> None:
    errors = pool(WORLD).run(jobs.ranks_with_other_nodes, 4, timeout_s=60)[:4]
    for rank, error in enumerate(errors):
        assert "config" in error and f"seen by rank {rank}" in error
