"""Colors, labels and saving, the same in every picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

INK, MUTED, GRID = "#222222", "#666666", "#d8d8d8"
_RANK_COLORS = (
    "#2f6db3", "#e08a2b", "#3c9d6b", "#b8476b", "#7a5bb0", "#8c6d3f", "#4aa3b5", "#999933",
)  # fmt: skip
MAX_LEGEND = 8
SHORTENED_FROM = 10_000
"""Numbers of a picture below this are written in full: 4,096 and not 4K, 5,000 and not 4.88K."""


def new_figure(rows: int, columns: int, width: float, height: float, **grid: Any) -> Any:
    """(figure, axes) without a display.

    Raises:
        ImportError: matplotlib is not there, with what to install.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib, which is not installed; "
            "run pip install 'megatron-magi[viz]' (or pip install matplotlib)"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **grid)


def rank_colors(cp_size: int) -> list[Any]:
    """A color per rank: distinct ones up to eight, then a ramp."""
    if cp_size <= len(_RANK_COLORS):
        return list(_RANK_COLORS[:cp_size])
    from matplotlib import colormaps

    ramp = colormaps["turbo"]
    return [ramp(0.06 + 0.88 * rank / (cp_size - 1)) for rank in range(cp_size)]


def text_color(background: Any) -> str:
    """Ink or white, whichever reads better on a color."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(background)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.62 else "white"


def title(axes: Any, text: str) -> None:
    """A bold heading at the panel's left edge."""
    axes.set_title(text, loc="left", color=INK, fontweight="bold", fontsize=11)


def plain_panel(axes: Any, heading: str, unit: str | None = None) -> None:
    """A heading, pale lines across, no frame above and at the right; ``unit``: of the y axis."""
    title(axes, heading)
    if unit is not None:
        axes.set_ylabel(unit, color=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelcolor=MUTED)


def heading(figure: Any, text: str) -> None:
    """One sentence above all panels."""
    figure.suptitle(text, x=0.012, ha="left", color=INK, fontsize=12)


def token_ticks(axes: Any, total: int, which: str) -> None:
    """Four ticks in tokens along the "x" or "y" axis of a mask."""
    ticks = quarters(total) if total >= 8 else list(range(total + 1))
    labels = [short(t, total) for t in ticks]
    getattr(axes, f"set_{which}ticks")(ticks, labels)
    axes.tick_params(length=0, labelcolor=MUTED)
    axes.spines[:].set_color(GRID)


def rank_ticks(axes: Any, cp_size: int, which: str) -> None:
    """Rank numbers, thinned out above 16."""
    ticks = range(0, cp_size, max(1, -(-cp_size // 16)))
    if "x" in which:
        axes.set_xticks(ticks)
    if "y" in which:
        axes.set_yticks(ticks)
    axes.tick_params(length=0, labelcolor=MUTED)
    axes.spines[:].set_visible(False)


def short(number: float, most: float = 0) -> str:
    """0, 640, 4,096; 1.5K, 32K, 3M: tokens and rows, in steps of 1024 next to large ones.

    Args:
        most: the largest number next to it, such as the end of its axis.
    """
    is_large = round(max(number, most)) >= SHORTENED_FROM
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if is_large and number >= size:
            digits = 3 if number < 999.5 * size else 4  # with 3, 1000 would be 1e+03
            return f"{number / size:.{digits}g}{unit}"
    return f"{number:,.0f}"


def counted(what: str, most: float) -> str:
    """The name of an axis whose numbers `short` writes, up to `most`; it explains the K of large
    ones."""
    return what if round(most) < SHORTENED_FROM else f"{what} (1K = 1,024)"


def quarters(most: int) -> list[int]:
    """Whole numbers from 0 to `most` for the ticks of an axis; five, or fewer if it is small."""
    return sorted({round(most * i / 4) for i in range(5)})


def save(figure: Any, stem: Path, formats: tuple[str, ...]) -> list[Path]:
    """Write STEM.FORMAT for every format; equal input gives equal bytes."""
    import matplotlib

    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in formats:
        path = stem.with_suffix(f".{kind}")
        metadata = {"Date": None} if kind == "svg" else None
        with matplotlib.rc_context({"svg.hashsalt": "megatron_magi", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=144, facecolor="white", metadata=metadata, bbox_inches="tight")
        paths.append(path)
    return paths
