"""Layers of several masks share a token layout that balances each of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import AttnMask, HeadShape, MagiConfig, masks
from megatron_magi.core.plan.attn_plan import AttnPlan
from megatron_magi.core.plan.layer_plans import make_layer_plans
from megatron_magi.core.plan.make_plan import make_attn_plan
from megatron_magi.core.plan.token_layout import LOAD_CAPS, LayerMasks, TokenLayout

HEADS, CONFIG = HeadShape(8, 2, 64), MagiConfig()
LAYERS = {"window_1_1": (1, 1, 128), "window_1_3": (1, 3, 4096), "window_1_5": (1, 5, 1024)}
"""Full layers, window layers, and the keys of a window."""


def pack(seed: int, total: int) -> list[int]:
    """Boundaries of documents with lengths of a log-normal distribution."""
    random, bounds = np.random.default_rng(seed), [0]
    while bounds[-1] < total:
        bounds.append(min(total, bounds[-1] + 1 + int(np.exp(random.normal(7, 1.3)))))
    return bounds


def full_and_window(bounds: list[int], kind: str) -> LayerMasks:
    full, window, keys = LAYERS[kind]
    return (
        (masks.from_cu_seqlens(bounds), full),
        (masks.from_cu_seqlens(bounds, window_size=(keys - 1, 0)), window),
    )


def waited_for(layers: LayerMasks, layout: TokenLayout) -> tuple[int, int]:
    """(tiles of the fullest rank of each layer, tiles of the rank with most in all layers)."""
    loads = [
        count * make_attn_plan(mask, layout.cp_size, HEADS, CONFIG, layout=layout).loads
        for mask, count in layers
    ]
    return sum(int(load.max()) for load in loads), int(sum(loads).max())


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("total", "cp_size"), [(32768, 4), (131072, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_no_mask_alone_gives_a_better_layout(
    kind: str, total: int, cp_size: int, seed: int
) -> None:
    layers = full_and_window(pack(seed, total), kind)
    plans = make_layer_plans(layers, cp_size, HEADS, CONFIG)
    assert plans[0].layout == plans[1].layout
    assert [plan.mask for plan in plans] == [mask for mask, _ in layers]
    shared = waited_for(layers, plans[0].layout)
    for mask, _ in layers:
        alone = waited_for(layers, make_attn_plan(mask, cp_size, HEADS, CONFIG).layout)
        # A mask that is balanced alone may use the cap for other tiles, so 1 % is a tie.
        assert all(ours <= LOAD_CAPS[0] * other for ours, other in zip(shared, alone, strict=True))


def test_the_wait_for_windows_goes() -> None:
    """Layers of both masks are within 2 % of their mean; full attention's layout loses 15 to 25."""
    losses = []
    for seed in range(3):
        layers = full_and_window(pack(seed, 131072), "window_1_3")
        mean = sum(waited_for(layers, one_rank(layers))) / 2 / 8
        by_full = make_attn_plan(layers[0][0], 8, HEADS, CONFIG).layout
        by_all = make_layer_plans(layers, 8, HEADS, CONFIG)[0].layout
        losses.append([waited_for(layers, layout)[0] / mean for layout in (by_full, by_all)])
    before, after = np.mean(losses, axis=0)
    assert before > 1.15 and after < 1.02


def one_rank(layers: LayerMasks) -> TokenLayout:
    return make_attn_plan(layers[0][0], 1, HEADS, CONFIG).layout


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=12),
    cp_size=st.integers(1, 5),
    window=st.integers(0, 300),
    counts=st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
def test_any_pair_of_masks_has_plans_on_one_layout(
    lengths: list[int], cp_size: int, window: int, counts: tuple[int, int]
) -> None:
    bounds = np.cumsum([0, *lengths])
    full = masks.from_cu_seqlens(bounds)
    local = masks.from_cu_seqlens(bounds, window_size=(window, 0))
    layers = ((full, counts[0]), (local, counts[1]))
    first, second = make_layer_plans(layers, cp_size, HEADS, CONFIG)
    assert first.layout == second.layout
    assert (first.mask, second.mask) == (full, local)
    again = make_layer_plans(layers, cp_size, HEADS, CONFIG)
    assert again == (first, second), "equal inputs give equal plans"


def test_one_mask_is_planned_as_alone() -> None:
    mask = masks.causal(4096)
    (plan,) = make_layer_plans(((mask, 7),), 4, HEADS, CONFIG)
    assert plan == make_attn_plan(mask, 4, HEADS, CONFIG)


def test_the_best_of_several_layouts_is_taken_among_nodes() -> None:
    """Between nodes, a layout with fewer rows may be worth a rank's wait."""
    config = replace(CONFIG, costs=replace(CONFIG.costs, ranks_per_node=2))
    layers = full_and_window(pack(1, 32768), "window_1_3")
    plans = make_layer_plans(layers, 4, HEADS, config)
    assert isinstance(plans[0], AttnPlan) and plans[0].layout == plans[1].layout


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ((), r"of one length, also of keys, got \[\]"),
        (
            ((masks.causal(8), 1), (masks.causal(9), 1)),
            r"of one length, also of keys, got \[8, 9\]",
        ),
        (((masks.causal(8), 0),), "number of layers must be .* got 0"),
    ],
)
def test_wrong_layers_are_refused(layers: tuple[tuple[AttnMask, int], ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_layer_plans(layers, 2, HEADS, CONFIG)
