"""Masks as text and as pictures."""

import numpy as np
import pytest

from megatron_magi import masks


def test_rendering() -> None:
    assert masks.render_dense(masks.causal(3)) == "#..\n##.\n###"
    plt = pytest.importorskip("matplotlib.pyplot")
    figure, axes = plt.subplots()
    masks.draw_mask(
        masks.from_cu_seqlens([0, 3, 3, 4, 11]), axes, row_bands=[(0, 4, "red"), (4, 11, "blue")]
    )
    drawn = sum(len(c.get_paths()) for c in axes.collections)
    plt.close(figure)
    assert drawn == 3


@pytest.mark.parametrize("band", [(-2, 3), (-100, 0), (0, 100), (-100, 100)])
def test_polygon_area_is_near_the_number_of_cells(band: tuple[int, int]) -> None:
    from megatron_magi.core.mask import AttnSlice
    from megatron_magi.viz.mask_drawing import slice_polygon

    s = AttnSlice(10, 60, 5, 70, *band)
    corners = np.array(slice_polygon(10, 60, 5, 70, *band))
    x, y = corners[:, 0], corners[:, 1]
    area = abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2
    assert area == pytest.approx(s.area(), rel=0.01)


@pytest.mark.parametrize("edge", ["low", "high"])
def test_a_polygon_is_cut_from_the_first_hidden_cell_on(edge: str) -> None:
    """A rectangle of rows 10 to 20 and keys 0 to 8; its corners are 19 below and 3 above."""
    from megatron_magi.viz.mask_drawing import slice_polygon

    whole = [(0, 10), (8, 10), (8, 20), (0, 20)]
    for hidden, corners in ((0, 4), (1, 5)):
        band = (hidden - 19, 100) if edge == "low" else (-100, -3 - hidden)
        outline = slice_polygon(10, 20, 0, 8, *band)
        assert len(outline) == corners and (outline == whole) == (hidden == 0)


def test_drawing_shows_the_whole_mask_with_queries_downward() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    masks.draw_mask(masks.full(12, 30), axes)
    assert axes.get_xlim() == (0, 30) and axes.get_ylim() == (12, 0)
