"""DistAttnRuntimeKey is a value, and each group's most recent one is remembered while it lives."""

import dataclasses
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_magi import magi_attention as api
from megatron_magi.core.runtime.plan_cache import cached_plan
from megatron_magi.magi_attention import runtime_key
from megatron_magi.magi_attention.runtime_key import flat_group, remember
from tests.magi_attention.one_rank import flex_key, varlen_key


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    api.clear_cache()
    yield
    api.clear_cache()


def key_of(group: Any) -> api.DistAttnRuntimeKey:
    return varlen_key(cp_group_or_mesh=group)


def test_a_key_is_a_hashable_frozen_value() -> None:
    key, same, other = varlen_key(), flex_key(), varlen_key(causal=True)
    assert key == same and hash(key) == hash(same) and len({key, same, other}) == 2
    with pytest.raises(FrozenInstanceError):
        key.cp_group = None  # type: ignore[misc]
    assert (key.total_seqlen_q, key.total_seqlen_k, key.pad_size, key.cp_rank) == (16, 16, 0, 0)
    assert (key.num_heads_q, key.num_heads_kv, key.head_dim) == (4, 2, 8)
    assert other.q_ranges.to_naive_ranges() == [(0, 5), (5, 16)] == [*map(tuple, other.k_ranges)]
    assert other.attn_mask_type == (api.AttnMaskType.CAUSAL,) * 2


def test_most_recent_key_and_clear_cache() -> None:
    with pytest.raises(ValueError, match=r"made with this cp_group.*call magi_attn"):
        api.get_most_recent_key(None)
    first = varlen_key()
    second = varlen_key(causal=True)
    assert api.get_most_recent_key(None) is second
    x = api.dispatch(torch.zeros(16, 2), first)
    assert api.get_most_recent_key(None) is first
    hits = cached_plan.cache_info().hits
    varlen_key()
    assert cached_plan.cache_info().hits == hits + 1
    api.clear_cache()
    with pytest.raises(ValueError):
        api.get_most_recent_key(cp_group=None)
    varlen_key()
    assert cached_plan.cache_info().hits == 0
    assert api.undispatch(x, first).shape == (16, 2), "a key outlives the cache"


def test_padding_and_chunks_are_those_of_the_plan(world: dist.ProcessGroup) -> None:
    config = api.DistAttnConfig(dispatch_config=api.DispatchConfig(chunk_size=3))
    key = varlen_key(cp_group_or_mesh=world, dist_attn_config=config)
    assert (key.chunk_size, key.plan.cp_size, key.cp_rank) == (3, 4, 2)
    assert (key.total_seqlen_q, key.total_seqlen_k, key.pad_size) == (16, 16, 8)


def test_ranges_are_the_masks_and_not_those_that_were_written() -> None:
    """Row by row: one causal document, then a rectangle that is full."""
    q, k = ([[0, 5], [5, 16]], [[0, 5], [0, 16]])
    key = flex_key(
        q_ranges=api.AttnRanges.from_ranges(q), k_ranges=api.AttnRanges.from_ranges(k),
        attn_mask_type=["causal", "full"],
    )  # fmt: skip
    rows = zip(key.q_ranges.to_naive_ranges(), key.k_ranges.to_naive_ranges(), key.attn_mask_type,
               strict=True)  # fmt: skip
    assert set(rows) == {
        ((0, 5), (0, 5), api.AttnMaskType.CAUSAL),
        ((5, 16), (0, 16), api.AttnMaskType.FULL),
    }


@pytest.mark.parametrize("field", ["plan", "cp_group", "dist_attn_config"])
def test_keys_differ_in_every_field(field: str, world: dist.ProcessGroup) -> None:
    key = key_of(world)
    overlap = api.OverlapConfig(degree=0)
    others = {
        "plan": varlen_key(cp_group_or_mesh=world, causal=True).plan,
        "cp_group": dist.new_group([0, 1, 2, 3]),
        "dist_attn_config": api.DistAttnConfig(overlap_config=overlap),
    }
    other = dataclasses.replace(key, **{field: others[field]})
    assert other != key and len({key, other, dataclasses.replace(other)}) == 2


def test_every_group_has_its_own_most_recent_key(world: dist.ProcessGroup) -> None:
    pair = dist.new_group([1, 2])
    keys = {group: key_of(group) for group in (None, world, pair)}
    for group, key in keys.items():
        assert api.get_most_recent_key(group) is key
    assert remember(keys[world]) is keys[world]
    api.clear_cache(pair)
    with pytest.raises(ValueError, match=r"needs a key made with this cp_group, got a group with"):
        api.get_most_recent_key(pair)
    api.clear_cache(pair)  # again: there is nothing left to forget
    assert api.get_most_recent_key(world) is keys[world]
    assert api.get_most_recent_key(None) is keys[None]


def test_a_groups_plans_stay_when_its_key_is_forgotten(world: dist.ProcessGroup) -> None:
    """Plans are values that other groups share."""
    key = key_of(world)
    api.clear_cache(world)
    assert key_of(world).plan is key.plan and cached_plan.cache_info().hits == 1
    api.clear_cache()
    assert key_of(world).plan is not key.plan


@pytest.mark.parametrize("ask", [lambda: remember(varlen_key()), lambda: None])
def test_a_destroyed_group_is_let_go(ask: Any, world: dist.ProcessGroup) -> None:
    """Its threads end only when nothing holds it; a key made or asked for afterwards lets it go."""
    pair = dist.new_group([0, 2])
    key, kept = key_of(pair), key_of(world)
    dist.destroy_process_group(pair)
    ask()
    with pytest.raises(ValueError, match="got a group without one"):
        api.get_most_recent_key(pair)
    assert pair not in runtime_key._most_recent and key.plan.cp_size == 2
    assert api.get_most_recent_key(world) is kept


def test_a_key_of_another_group_lets_a_destroyed_one_go(world: dist.ProcessGroup) -> None:
    pair = dist.new_group([0, 2])
    key_of(pair)
    dist.destroy_process_group(pair)
    varlen_key()
    assert list(runtime_key._most_recent) == [None]


def test_a_mesh_is_one_group(world: dist.ProcessGroup) -> None:
    assert flat_group(None) is None and flat_group(world) is world
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
    flat = flat_group(grid)
    assert flat is not None and flat.size() == 4 and flat_group(grid) is flat
    line = grid["rank"]
    assert flat_group(line) is line.get_group()
    key = key_of(grid)
    assert key.cp_group is flat and api.get_most_recent_key(grid) is key
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pod", "node", "rank"))
    assert (whole := flat_group(cube)) is not None and whole.size() == 4
    scattered = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("node", "rank"))
    with pytest.raises(ValueError, match="must be in the order of its group"):
        key_of(scattered)
    with pytest.raises(TypeError, match=r"cp_group must be a ProcessGroup, .* got str"):
        flat_group("cp")  # type: ignore[arg-type]
