"""Pictures of a mask and its plan: panels, owners, loads and traffic are those of the plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_magi import AttnMask, HeadShape, MagiConfig, masks
from megatron_magi.core.plan import AttnPlan, make_attn_plan
from megatron_magi.core.plan.peer_rows import rows_between
from megatron_magi.viz.plan_facts import (
    OURS,
    PER_DOCUMENT,
    PER_SEQUENCE,
    Layouts,
    compare_layouts,
    ring_rows,
    zigzag_layout,
)
from megatron_magi.viz.plan_figures import (
    layouts_there,
    mask_figure,
    shares_figure,
    traffic_figure,
)
from megatron_magi.viz.style import rank_colors, short

to_rgba = pytest.importorskip("matplotlib.colors", reason="draws").to_rgba

MASK = masks.from_cu_seqlens([0, 3000, 3100, 8192])
HEADS = HeadShape(8, 2, 64)


def plan(cp_size: int, mask: AttnMask = MASK, **more: Any) -> AttnPlan:
    return make_attn_plan(mask, cp_size, HEADS, MagiConfig(), **more)


def layouts(cp_size: int, mask: AttnMask = MASK) -> Layouts:
    usual = zigzag_layout(mask.total_seqlen_q, cp_size)
    return compare_layouts(plan(cp_size, mask), plan(cp_size, mask, layout=usual))


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_mask_has_its_name_and_its_tokens() -> None:
    (axes,) = mask_figure(masks.full(12, 30), "all").axes
    assert axes.get_title(loc="left") == "all"
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 30), (12, 0))
    assert axes.get_xticks()[-1] == 30 and axes.get_yticks()[-1] == 12
    assert mask_figure(MASK).axes[0].get_title(loc="left") == ""


def test_rows_have_the_color_of_their_rank() -> None:
    cp_size = 3
    made = layouts(cp_size)
    panels = shares_figure(made, "text").axes[:-1]
    assert [p.get_title(loc="left") for p in panels] == [PER_SEQUENCE, PER_DOCUMENT, OURS]
    for axes, one in zip(panels, made.values(), strict=True):
        assert one is not None
        drawn = {to_rgba(c) for part in axes.collections for c in part.get_facecolor()}
        assert drawn == {to_rgba(color) for color in rank_colors(cp_size)}
    names = [text.get_text() for text in panels[0].get_legend().get_texts()]
    assert names == ["rank 0", "rank 1", "rank 2"]
    assert shares_figure(layouts(9), "text").axes[0].get_legend() is None, "too many ranks"


def test_loads_are_bars_over_the_mean() -> None:
    made = layouts(3)
    axes = shares_figure(made, "text").axes[-1]
    wanted = np.concatenate([one.loads / one.loads.mean() for one in made.values() if one])
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(wanted)
    shown = texts(axes)
    for name, one in made.items():
        assert one is not None and f"{name}: max/mean {one.imbalance:.3f}\n" in shown
    assert [text for text in shown if len(text) == 4] == [f"{load:.2f}" for load in wanted]
    ours = made[OURS]
    assert ours is not None
    received = short(ours.rows_received.mean())
    assert (
        f"key rows received: {received}, all needed; padding {short(ours.padding_tokens)}" in shown
    )
    usual = made[PER_SEQUENCE]
    assert usual is not None
    needed = f"{short(usual.rows_received.mean())}, needed {short(usual.rows_needed.mean())}"
    assert f"key rows received: {needed}; padding {short(usual.padding_tokens)}" in shown


def test_a_layout_that_the_mask_does_not_have_is_named_above() -> None:
    made = layouts(2, masks.prefix_lm([0, 1024], [8]))
    assert list(layouts_there(made)) == [PER_SEQUENCE, OURS]
    figure = shares_figure(made, "a prefix")
    assert len(figure.axes) == 3
    assert figure.get_suptitle().startswith(f"a prefix; {PER_DOCUMENT}: - (only masks of packed")


def test_traffic_is_the_plans_matrix_and_its_share_of_a_ring() -> None:
    p = plan(4)
    axes, side, _ = traffic_figure(p).axes
    rows = rows_between(p.transfers, p.cp_size)
    written = {(t.get_position()[1], t.get_position()[0]): t.get_text() for t in axes.texts}
    assert written == {(i, j): short(rows[i, j]) for i in range(4) for j in range(4) if i != j}
    (image,) = axes.images
    assert np.array_equal(image.get_array().filled(-1), np.where(np.eye(4), -1, rows))
    widths = [bar.get_width() for bar in side.patches]
    assert widths == [ring_rows(p)] * 4 + p.rows_received.tolist()
    share = p.rows_received.sum() / (4 * ring_rows(p))
    assert side.get_title(loc="left") == f"Received: {share:.1%} of a ring's rows"


@pytest.mark.parametrize(("cp_size", "numbers"), [(1, 0), (12, 132), (13, 0)])
def test_cells_have_numbers_where_there_is_room(cp_size: int, numbers: int) -> None:
    figure = traffic_figure(plan(cp_size))
    assert len(figure.axes[0].texts) == numbers
    if cp_size == 1:
        assert figure.axes[1].get_title(loc="left") == "Received: 0.0% of a ring's rows"
