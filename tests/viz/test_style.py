"""What all pictures share: colors that differ, numbers on axes, and equal bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_magi.viz.style import (
    INK,
    counted,
    heading,
    new_figure,
    quarters,
    rank_colors,
    rank_ticks,
    save,
    short,
    text_color,
    title,
    token_ticks,
)


@pytest.fixture
def axes() -> Any:
    pytest.importorskip("matplotlib", reason="draws")
    return new_figure(1, 1, 2, 2)[1]


def shown(labels: Any) -> list[str]:
    return [label.get_text() for label in labels]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (639.6, "640"),
        (1023, "1,023"),
        (4096, "4,096"),
        (5000, "5,000"),
        (9999.4, "9,999"),
        (9999.6, "9.77K"),
        (10_240, "10K"),
        (32 * 1024, "32K"),
        (1000 * 1024, "1000K"),
        (1024 * 1024 - 1024, "1023K"),
        (3 * 2**20, "3M"),
        (1.25 * 2**20, "1.25M"),
        (2**30, "1024M"),
    ],
)
def test_numbers_on_an_axis_are_short(number: float, text: str) -> None:
    assert short(number) == text


def test_numbers_beside_large_ones_have_their_unit() -> None:
    assert [short(n, 32_768) for n in (0, 1023, 1536, 8192)] == ["0", "1,023", "1.5K", "8K"]


def test_an_axis_says_what_its_k_is() -> None:
    assert counted("key", 4096) == "key"
    assert counted("key", 9999.6) == "key (1K = 1,024)"


@pytest.mark.parametrize(
    "most, ticks",
    [(0, [0]), (1, [0, 1]), (70, [0, 18, 35, 52, 70]), (4096, [0, 1024, 2048, 3072, 4096])],
)
def test_ticks_stand_where_their_number_is(most: int, ticks: list[int]) -> None:
    assert quarters(most) == ticks


@pytest.mark.parametrize("cp_size", [1, 2, 8, 9, 64])
def test_every_rank_has_a_color_of_its_own(cp_size: int) -> None:
    to_rgba = pytest.importorskip("matplotlib.colors").to_rgba
    colors = [to_rgba(color) for color in rank_colors(cp_size)]
    assert len(set(colors)) == len(colors) == cp_size


def test_a_ranks_color_is_the_same_for_up_to_eight_ranks() -> None:
    assert [rank_colors(n) for n in range(1, 8)] == [rank_colors(8)[:n] for n in range(1, 8)]


def test_text_is_dark_on_light_and_white_on_dark() -> None:
    pytest.importorskip("matplotlib")
    assert text_color("white") == text_color("#ffe0a0") == text_color("#4fff4f") == INK
    assert text_color("black") == text_color("#2f6db3") == text_color("blue") == "white"


def test_a_mask_has_ticks_at_its_quarters(axes: Any) -> None:
    token_ticks(axes, 8192, "x")
    assert axes.get_xticks().tolist() == [0, 2048, 4096, 6144, 8192]
    assert shown(axes.get_xticklabels()) == ["0", "2,048", "4,096", "6,144", "8,192"]
    token_ticks(axes, 16_384, "x")
    assert shown(axes.get_xticklabels()) == ["0", "4K", "8K", "12K", "16K"]
    assert axes.get_yticks().tolist() != axes.get_xticks().tolist()
    token_ticks(axes, 3, "y")
    assert axes.get_yticks().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("cp_size", "step", "count"), [(1, 1, 1), (16, 1, 16), (17, 2, 9), (32, 2, 16), (33, 3, 11)]
)
def test_ranks_are_numbered_up_to_sixteen_times(
    axes: Any, cp_size: int, step: int, count: int
) -> None:
    rank_ticks(axes, cp_size, "xy")
    for ticks in (axes.get_xticks(), axes.get_yticks()):
        assert ticks.tolist() == [step * i for i in range(count)]


def test_headings_stand_at_the_left(axes: Any) -> None:
    title(axes, "a panel")
    heading(axes.figure, "a sentence")
    assert axes.get_title(loc="left") == "a panel" and axes.figure.get_suptitle() == "a sentence"


def test_pictures_are_saved_in_every_format_with_equal_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        figure, axes = new_figure(1, 1, 1, 1)
        axes.plot([0, 1], [0, 1], label="line")
        paths = save(figure, tmp_path / "new" / name, ("svg", "png"))
        assert paths == [tmp_path / "new" / f"{name}.{kind}" for kind in ("svg", "png")]
    for kind in ("svg", "png"):
        first, second = ((tmp_path / "new" / f"{name}.{kind}").read_bytes() for name in "ab")
        assert first == second


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'megatron-magi\[viz\]'"):
        new_figure(1, 1, 1, 1)
