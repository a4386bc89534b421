"""The checks of arguments: what passes comes back in its plain form, the rest is one error."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from megatron_magi import checks


class Index:
    """An integer of nobody's library."""

    def __index__(self) -> int:
        return 7


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("not now")


@pytest.mark.parametrize("value", [7, np.int32(7), np.uint64(7), torch.tensor(7), Index()])
def test_any_integer_comes_back_as_an_int(value: Any) -> None:
    assert checks.is_integer_like(value)
    made = checks.integer(value, "size")
    assert type(made) is int and made == 7


@pytest.mark.parametrize("value", [True, np.bool_(True), 7.0, "7", None, torch.tensor([7, 8])])
def test_what_only_looks_like_an_integer_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^size must be an integer, got .*; pass a whole number"):
        checks.integer(value, "size")


@pytest.mark.parametrize(
    "bounds, bad, text",
    [((1, None), 0, "at least 1"), ((None, 3), 4, "at most 3"), ((1, 3), 4, "between 1 and 3")],
)
def test_both_bounds_are_allowed_and_nothing_beyond(
    bounds: tuple[int | None, int | None], bad: int, text: str
) -> None:
    for bound in bounds:
        if bound is not None:
            assert checks.integer(bound, "size", *bounds) == bound
    with pytest.raises(ValueError, match=rf"^size must be {text}, got {bad}; pass one in range"):
        checks.integer(bad, "size", *bounds)


def test_an_optional_integer_is_one_or_none() -> None:
    assert checks.optional_integer(None, "size", 1) is None
    assert checks.optional_integer(np.int64(3), "size", 1) == 3
    with pytest.raises(ValueError, match="at least 1, got 0"):
        checks.optional_integer(0, "size", 1)


@pytest.mark.parametrize(
    "value", [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor(0.5).bfloat16()]
)
def test_any_number_comes_back_as_a_float(value: Any) -> None:
    made = checks.number(value, "scale")
    assert type(made) is float and made == 0.5


@pytest.mark.parametrize("value", ["0.5", b"1", True, 1j, None, np.array([0.5]), 10**400])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^scale must be a number, got .*; pass a float"):
        checks.number(value, "scale")


def test_a_number_gets_no_gradient() -> None:
    """A learnable scale would stay as it is, without a word."""
    with pytest.raises(
        TypeError, match=r"^scale must be a number, got a tensor that requires a gr"
    ):
        checks.number(torch.nn.Parameter(torch.tensor(0.5)), "scale")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_only_where_it_is_allowed_a_number_is_infinite(value: float) -> None:
    assert checks.number_or_infinite(value, "fill") is value
    with pytest.raises(ValueError, match=r"^scale must be finite, got"):
        checks.number(value, "scale")


@pytest.mark.parametrize("value", [True, np.bool_(True)])
def test_a_flag_is_a_bool_of_python_or_numpy(value: Any) -> None:
    assert checks.flag(value, "causal") is True
    for bad in (1, 0.0, "True", None, np.array([True]), torch.tensor(True)):
        with pytest.raises(TypeError, match=r"^causal must be True or False, got"):
            checks.flag(bad, "causal")


def test_an_instance_names_the_class_and_the_remedy() -> None:
    checks.instance(None, (Index, type(None)), "group", "make one")
    with pytest.raises(TypeError, match=r"^group must be an Index or None, got 'x'; make one$"):
        checks.instance("x", (Index, type(None)), "group", "make one")
    with pytest.raises(TypeError, match=r"^mask must be a float, got 3; make one$"):
        checks.instance(3, float, "mask", "make one")


@pytest.mark.parametrize(
    "choices, listed",
    [(("a",), "'a'"), (("a", "b"), "'a' or 'b'"), (("a", "b", "c"), "'a', 'b' or 'c'")],
)
def test_a_word_is_one_of_its_choices(choices: tuple[str, ...], listed: str) -> None:
    assert checks.word("a", "mode", choices) == "a"
    text = f"^mode must be {listed}, got {{}}; use one of them$"
    with pytest.raises(ValueError, match=text.format("'z'")):
        checks.word("z", "mode", choices)
    with pytest.raises(TypeError, match=text.format("3")):
        checks.word(3, "mode", choices)


def test_a_pair_is_two_of_something_and_no_text() -> None:
    assert checks.pair([1, None], "window", "(left, right)") == (1, None)
    for bad in ("ab", {1: 2, 3: 4}, (1, 2, 3), 4, None):
        with pytest.raises(TypeError, match=re.escape("window must be a pair (left, right), got")):
            checks.pair(bad, "window", "(left, right)")


@pytest.mark.parametrize(
    "values", [[1, 2], (1, 2), np.array([1, 2], np.uint8), torch.tensor([1, 2]), range(1, 3)]
)
def test_integers_come_back_as_int64(values: Any) -> None:
    made = checks.int_array(values, "lengths")
    assert made.dtype == np.int64 and checks.integers(values, "lengths") == [1, 2]


def test_an_empty_list_holds_integers() -> None:
    assert checks.integers([], "lengths") == []
    assert checks.int_array(np.zeros((0, 2)), "ranges").shape == (0, 2)


@pytest.mark.parametrize(
    "values, text",
    [
        ([1.0], r"got float64 \[1\]"),
        (np.array([1, 2], "m8[s]"), r"got timedelta64\[s\] \[2\]"),
        ([1, True], "got bool"),
        ([[0, 1], [2, np.bool_(True)]], "got bool"),
        ([[0], [1, 2]], r"got \[\[0\], \[1, 2\]\] \("),
        (torch.zeros(2, requires_grad=True), r"got Tensor torch.float32 \[2\] \("),
    ],
    ids=["float", "time", "flat bool", "nested bool", "ragged", "gradient"],
)
def test_nothing_is_rounded_to_an_integer(values: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"^lengths must hold integers, {text}"):
        checks.int_array(values, "lengths")


def test_no_integer_is_wrapped() -> None:
    assert checks.integers(np.array([2**63 - 1], np.uint64), "sums") == [2**63 - 1]
    with pytest.raises(ValueError, match=r"^sums must fit in int64, got values up to 18446744073"):
        checks.int_array(np.array([2**64 - 1], np.uint64), "sums")


def test_integers_are_one_row() -> None:
    with pytest.raises(ValueError, match=r"one row of integers, got shape \[1, 2\]; flatten it"):
        checks.integers([[1, 2]], "lengths")


@pytest.mark.parametrize(
    "value, text",
    [
        ("x" * 58, repr("x" * 58)),
        ("x" * 59, "str"),
        (np.zeros((2, 3)), "ndarray float64 [2, 3]"),
        (torch.zeros(4), "Tensor torch.float32 [4]"),
        (Unprintable(), "Unprintable"),
    ],
    ids=["short", "long", "array", "tensor", "unprintable"],
)
def test_a_value_is_shown_if_it_is_short(value: Any, text: str) -> None:
    assert checks.shown(value) == text
