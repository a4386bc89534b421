"""The plan cache: every input is part of the key, the oldest plans go, threads may share it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import megatron_magi as magi
from megatron_magi import AttnPlan, HeadShape, MagiConfig, masks
from megatron_magi.core.runtime.plan_cache import CAPACITY, cached_plan

SHAPE = HeadShape(4, 2, 8)
FIRST = dict(mask=masks.causal(96), cp_size=2, head_shape=SHAPE, config=MagiConfig())


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    cached_plan.cache_clear()
    yield
    cached_plan.cache_clear()


def test_equal_inputs_meet_in_one_plan() -> None:
    first = magi.plan(**FIRST)
    assert magi.plan(masks.from_cu_seqlens([0, 96]), 2, HeadShape(4, 2, 8)) is first
    assert cached_plan.cache_info().hits == 1


@pytest.mark.parametrize(
    "change",
    [
        dict(mask=masks.full(96)),
        dict(cp_size=3),
        dict(head_shape=HeadShape(4, 4, 8)),
        dict(config=MagiConfig(chunk_size=8)),
        dict(config=MagiConfig(deterministic=True)),
        dict(layout=magi.plan(masks.full(96), 2, SHAPE, MagiConfig(chunk_size=6)).layout),
        dict(token_multiple=10),
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_input_is_part_of_the_key(change: dict) -> None:
    first = magi.plan(**FIRST)
    other = magi.plan(**{**FIRST, **change})
    assert other is not first and cached_plan.cache_info().hits == 0
    if "layout" in change:
        assert other.layout == change["layout"] != first.layout
    assert other.layout.num_local_tokens % change.get("token_multiple", 1) == 0
    assert magi.plan(**FIRST) is first


def test_the_least_recently_used_plan_goes() -> None:
    def get(tokens: int) -> AttnPlan:
        return cached_plan(masks.causal(tokens), 1, SHAPE, MagiConfig(), None, None, 1)

    first, second = get(8), get(9)
    for tokens in range(10, 10 + CAPACITY - 2):
        get(tokens)
    assert get(8) is first
    get(7)
    assert get(8) is first and get(9) is not second and cached_plan.cache_info().hits == 2


def test_threads_get_equal_plans() -> None:
    lengths = [64 + i % 7 for i in range(140)]
    with ThreadPoolExecutor(6) as pool:
        plans = list(pool.map(lambda n: magi.plan(masks.causal(n), 4, SHAPE), lengths))
    for tokens, made in zip(lengths, plans, strict=True):
        assert made == magi.plan(masks.causal(tokens), 4, SHAPE)
        assert made.rank_plan(1).num_local_tokens == made.layout.num_local_tokens
