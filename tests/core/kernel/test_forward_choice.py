"""The forward that is chosen costs least, by an estimate that is written here once more."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import AttnMask, masks
from megatron_magi.core.native import solver
from tests.dense import random_mask

STEP = {
    (64, 128, 128): 0.66, (64, 192, 128): 0.86,
    (96, 128, 128): 0.85, (96, 192, 96): 0.85,
    (128, 192, 80): 0.80, (128, 192, 64): 0.68, (128, 128, 128): 0.90,
    (192, 128, 128): 1.05, (192, 192, 80): 1.02, (256, 128, 80): 1.08,
}  # fmt: skip
Heads = tuple[int, int, int]


def makespan(costs: list[float], units: int, num_sms: int) -> float:
    free = [0.0] * num_sms
    for cost in costs:
        for _ in range(units):
            heapq.heapreplace(free, free[0] + cost)
    return max(free)


def estimate(
    work: solver.FwdWorkList, heads: Heads, variant: tuple[int, int, int], num_sms: int
) -> float:
    pack, *tile = variant
    units, step = heads[0] // pack, STEP[(heads[2], *tile)]
    walks = work.tiles[:, 4].tolist()
    if not walks:
        return 0.0
    if units * len(walks) <= 8 * num_sms:
        return makespan([step * n + 0.3 for n in walks], units, num_sms)
    total = step * work.steps + 0.07 * work.masked_steps + 0.3 * len(walks)
    return max(units * total / num_sms, step * max(walks) + 0.3)


def least(mask: AttnMask, heads: Heads, num_sms: int) -> float:
    """Over all variants, whole walks and walks in parts."""
    sizes = mask.total_seqlen_q, mask.total_seqlen_k
    found = []
    for variant in solver.fwd_variants(*heads):
        pack, block_m, block_n = variant
        given = mask.slices, *sizes, block_m // pack, block_n
        whole = solver.fwd_work_list(*given)
        found.append(estimate(whole, heads, variant, num_sms))
        longest = max(whole.tiles[:, 4].tolist(), default=0)
        even = -(-heads[0] // pack * whole.steps // num_sms)
        steps = max(even, -(-longest // 8), 8)
        if longest >= 2 * steps:
            parts = solver.fwd_work_list(*given, steps)
            merging = 30.0 * (parts.num_parts - 1)
            found.append(estimate(parts, heads, variant, num_sms) + merging)
    return min(found)


@given(
    seed=st.integers(0, 2**31),
    heads=st.sampled_from(
        [
            (4, 2, 64),
            (8, 1, 128),
            (3, 3, 128),
            (64, 8, 64),
            (12, 2, 128),
            (16, 4, 256),
            (8, 2, 96),
            (6, 6, 192),
        ]
    ),
    num_sms=st.sampled_from([1, 3, 132]),
    sizes=st.tuples(st.integers(1, 1500), st.integers(1, 1500)),
)
@settings(max_examples=40, deadline=None)
def test_the_least_estimate_is_taken(
    seed: int, heads: Heads, num_sms: int, sizes: tuple[int, int]
) -> None:
    mask = random_mask(seed, *sizes)
    chosen = solver.choose_fwd(mask.slices, *sizes, *heads, num_sms)
    assert chosen.cost == pytest.approx(least(mask, heads, num_sms), rel=1e-12)
    variant = chosen.pack, chosen.block_m, chosen.block_n
    merging = 30.0 * (chosen.work.num_parts - 1)
    own = estimate(chosen.work, heads, variant, num_sms) + merging
    assert chosen.cost == pytest.approx(own, rel=1e-12), "the work list is that of the choice"


def test_few_rows_and_many_keys_are_walked_in_parts() -> None:
    mask = masks.from_ranges([[0, 64]], [[0, 131072]], [0], total_seqlen_q=64,
                             total_seqlen_k=131072)  # fmt: skip
    chosen = solver.choose_fwd(mask.slices, 64, 131072, 2, 1, 128, 132)
    assert chosen.work.num_parts > 1
    assert chosen.cost == pytest.approx(least(mask, (2, 1, 128), 132))


def test_heads_are_packed_as_far_as_they_can_be_or_not_at_all() -> None:
    packs = {(q, kv): {p for p, *_ in solver.fwd_variants(q, kv, 128)}
             for q, kv in ((8, 8), (8, 2), (24, 2), (256, 2))}  # fmt: skip
    assert packs == {(8, 8): {1}, (8, 2): {1, 4}, (24, 2): {1, 4}, (256, 2): {1, 64}}


@pytest.mark.parametrize("keys, together", [(1000, 8), (16384, 4), (10**7, 1)])
def test_heads_walked_together_fit_in_the_cache(keys: int, together: int) -> None:
    """32 MiB of keys and values, in sections of equally many heads."""
    mask = masks.from_ranges(
        [[0, 40000]], [[0, keys]], [0], total_seqlen_q=40000, total_seqlen_k=keys
    )
    chosen = solver.choose_fwd(mask.slices, 40000, keys, 64, 8, 128, 132)
    assert chosen.heads_per_section == together


@pytest.mark.parametrize("tokens, together", [(16384, 8), (65536, 3), (2**20, 1)])
def test_heads_walked_together_fill_the_processors(tokens: int, together: int) -> None:
    """Few tiles of a head: eight items for every processor, or half as many where the heads of two
    sections are equally many, whatever the cache holds."""
    chosen = solver.choose_fwd(masks.causal(tokens).slices, tokens, tokens, 16, 16, 192, 132)
    items = len(chosen.work.tiles) * together
    assert chosen.heads_per_section == together
    assert items >= 8 * 132 / 2 and (together == 1 or items < 2 * 8 * 132)


def test_another_head_dim_has_no_kernel() -> None:
    with pytest.raises(ValueError, match="no forward kernel for head_dim 80"):
        solver.choose_fwd(masks.causal(64).slices, 64, 64, 1, 1, 80, 132)
