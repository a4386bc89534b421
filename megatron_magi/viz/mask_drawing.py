"""Masks as text and as pictures (matplotlib, the optional extra ``viz``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_magi.checks import instance, shown
from megatron_magi.core.mask.mask import AttnMask, check_mask

Point = tuple[float, float]


def render_dense(mask: AttnMask, visible: str = "#", hidden: str = ".") -> str:
    """One line per query, one character per key; for small masks.

    Raises:
        ValueError: a mask above the size that ``AttnMask.to_dense`` allows.
    """
    check_mask(mask)
    for name, value in (("visible", visible), ("hidden", hidden)):
        instance(value, str, name, "pass one character")
    return "\n".join(
        "".join(visible if cell else hidden for cell in row) for row in mask.to_dense()
    )


def slice_polygon(q0: int, q1: int, k0: int, k1: int, d_lo: int, d_hi: int) -> list[Point]:
    """Outline of a slice as (k, q) corners: the rectangle clipped by both edges of the band.

    The edges run through the middle of the staircase of cells, so equal areas look equal. An edge
    that hides no cell of the rectangle does not clip its corner.
    """
    outline: list[Point] = [(k0, q0), (k1, q0), (k1, q1), (k0, q1)]
    if d_lo > k0 - (q1 - 1):
        outline = _clip(outline, lambda k, q: k - q - (d_lo - 0.5))
    if d_hi < (k1 - 1) - q0:
        outline = _clip(outline, lambda k, q: (d_hi + 0.5) - (k - q))
    return outline


def _clip(outline: list[Point], inside: Callable[[float, float], float]) -> list[Point]:
    """The part of a convex outline where the linear function ``inside`` is not negative."""
    kept: list[Point] = []
    for a, b in zip(outline, outline[1:] + outline[:1], strict=True):
        side_a, side_b = inside(*a), inside(*b)
        if side_a >= 0:
            kept.append(a)
        if min(side_a, side_b) < 0 < max(side_a, side_b):
            t = side_a / (side_a - side_b)
            kept.append((a[0] + t * (b[0] - a[0]), a[1] + t * (b[1] - a[1])))
    return kept


def draw_mask(
    mask: AttnMask,
    axes: Any,
    *,
    row_bands: list[tuple[int, int, Any]] | None = None,
    color: Any = "#4c72b0",
) -> None:
    """Draw the visible cells on matplotlib axes, queries downward and keys to the right.

    Args:
        mask: Any size; slices are drawn as polygons, never cell by cell.
        axes: matplotlib Axes.
        row_bands: (start, end, color) per run of queries, e.g. the ranks that own them; cells are
            drawn in the color of their row. None: everything in ``color``.
        color: of rows outside every band.
    """
    check_mask(mask)
    instance(row_bands, (list, tuple, type(None)), "row_bands", "pass (start, end, color) tuples")
    if not hasattr(axes, "add_collection"):
        raise TypeError(
            f"axes must be matplotlib Axes, got {shown(axes)}; pass the second result of "
            f"matplotlib.pyplot.subplots()"
        )
    from matplotlib.collections import PolyCollection

    by_color: dict[Any, list[list[Point]]] = {}
    q0, q1 = mask.slices[:, 0], mask.slices[:, 1]
    for start, end, band_color in row_bands or [(0, mask.total_seqlen_q, color)]:
        by_color.setdefault(band_color, []).extend(
            slice_polygon(max(s[0], start), min(s[1], end), *s[2:])
            for s in mask.slices[(q0 < end) & (q1 > start)].tolist()
        )
    for band_color, polygons in by_color.items():
        axes.add_collection(
            PolyCollection([p for p in polygons if len(p) > 2], facecolor=band_color, linewidth=0)
        )
    axes.set_xlim(0, mask.total_seqlen_k)
    axes.set_ylim(mask.total_seqlen_q, 0)
    axes.set_aspect("equal")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
