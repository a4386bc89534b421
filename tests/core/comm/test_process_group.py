"""What may name the context-parallel group: size, rank, and whether the group still exists.

The groups are PyTorch's fake ones: four ranks of which this process is the third, without a peer.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_magi.core.comm import process_group as module
from megatron_magi.core.comm.process_group import (
    group_rank,
    group_size,
    is_alive,
    mesh_ranks_per_node,
    resolve_group,
)

SIZE, RANK = 4, 2
"""Of the fixture `world`."""


def test_no_group_is_one_rank() -> None:
    assert resolve_group(None) is None
    assert (group_size(None), group_rank(None)) == (1, 0)


def test_a_group_is_itself(world: dist.ProcessGroup) -> None:
    assert resolve_group(world) is world
    assert (group_size(world), group_rank(world)) == (SIZE, RANK)


def test_ranks_are_those_in_the_group(world: dist.ProcessGroup) -> None:
    pair = dist.new_group([1, RANK])
    assert (group_size(pair), group_rank(pair)) == (2, 1)


def test_a_mesh_of_one_dimension_is_its_group(world: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    assert resolve_group(mesh["cp"]) is mesh["cp"].get_group()
    assert (group_size(mesh["cp"]), group_rank(mesh["cp"])) == (2, 0)


def test_a_mesh_of_nodes_is_one_group(world: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
    assert (group_size(mesh), group_rank(mesh)) == (SIZE, RANK)
    assert resolve_group(mesh) is resolve_group(mesh)
    assert mesh_ranks_per_node(mesh) == 2 and mesh_ranks_per_node(mesh["rank"]) is None
    assert mesh_ranks_per_node(world) is None and mesh_ranks_per_node(None) is None
    with pytest.raises(ValueError, match="must have names, got none; pass mesh_dim_names"):
        resolve_group(init_device_mesh("cpu", (2, 2)))
    with pytest.raises(ValueError, match=r"one dimension, or two, .* got 3; pass mesh"):
        resolve_group(init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c")))


def test_a_mesh_whose_nodes_are_no_neighbours_is_refused(world: dist.ProcessGroup) -> None:
    """Its group counts ranks in ascending order, and would take 0 and 1 for a node."""
    for ranks in ([[0, 2], [1, 3]], [[3, 2], [1, 0]]):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("node", "rank"))
        for ask in (resolve_group, group_size, group_rank):
            with pytest.raises(ValueError, match=r"order of its group, \[0, 1, 2, 3\], .* pass"):
                ask(mesh)


@pytest.mark.parametrize("bad", [0, "cp", SimpleNamespace(size=lambda: 1, rank=lambda: 0)])
def test_other_values_are_refused(bad: object) -> None:
    """Also what has a size and a rank: nothing could be sent through it."""
    text = (
        f"must be a ProcessGroup, a 1-D or 2-D DeviceMesh or None, got {type(bad).__name__}; pass"
    )
    for ask in (resolve_group, group_size, group_rank):
        with pytest.raises(TypeError, match=text):
            ask(bad)


def test_a_group_lives_until_it_is_destroyed(world: dist.ProcessGroup) -> None:
    pair, other = dist.new_group([0, RANK]), dist.new_group([1, RANK])
    assert is_alive(world) and is_alive(pair) and is_alive(other)
    dist.destroy_process_group(pair)
    assert not is_alive(pair) and is_alive(other) and is_alive(world)
    dist.destroy_process_group()
    assert not is_alive(other) and not is_alive(world)


def test_a_group_of_an_earlier_world_is_dead(world: dist.ProcessGroup) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert dist.group.WORLD is not None
    assert not is_alive(world) and is_alive(dist.group.WORLD)


class Rank(NamedTuple):
    """A group as one of its ranks sees it."""

    group_name: str
    ranks: list[int]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The job's."""
    made = dist.HashStore()
    monkeypatch.setattr(module, "_get_default_store", lambda: made)
    monkeypatch.setattr(module.dist, "get_process_group_ranks", lambda group: group.ranks)
    monkeypatch.setattr(module, "_num_opened", Counter())
    return made


def test_ranks_of_a_group_meet_and_no_others(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same name may stand for groups of other ranks, and for one that is made again."""
    group: Any = Rank("7", [0, 2])
    place = module.rendezvous_store(group, "reduces")
    place.set("address", "here")
    assert not module.rendezvous_store(group, "reduces").check(["address"])
    others: list[Any] = [Rank("7", [0, 3]), Rank("8", [0, 2]), Rank("7", [0])]
    asked = [*((other, "reduces") for other in others), (group, "agreement"), (group, "reduces")]
    for one, purpose in asked:
        monkeypatch.setattr(module, "_num_opened", Counter())  # another process
        found = module.rendezvous_store(one, purpose).check(["address"])
        assert found == (one is group and purpose == "reduces")
