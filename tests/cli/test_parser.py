"""Numbers and hints of the command line's parser."""

import pytest

from megatron_magi.cli.parser import (
    LARGEST_NUMBER,
    MOST_NUMBERS,
    CommandParser,
    UsageError,
    nearest,
    numbers,
)


@pytest.mark.parametrize("text, wanted", [
    ("8", [8]),
    ("4096,8192x3", [4096, 8192, 8192, 8192]),
    (" 1, 2\n3  4x2 ", [1, 2, 3, 4, 4]),
    ("0", [0]),
    ("7x0,1", [1]),
    (str(LARGEST_NUMBER), [LARGEST_NUMBER]),
])  # fmt: skip
def test_numbers(text: str, wanted: list[int]) -> None:
    assert numbers(text) == wanted


def test_as_many_numbers_as_are_allowed() -> None:
    assert len(numbers(f"1x{MOST_NUMBERS}")) == MOST_NUMBERS


@pytest.mark.parametrize("text, part", [
    ("", "numbers must look like 4096,8192x3, got ''"),
    ("-1", "got '-1'"),
    ("1.5", "got '1.5'"),
    ("8x", "got '8x'"),
    ("1,,x2", "got 'x2'"),
    ("9" * 100, f"got '{'9' * 57}...'"),
    (str(LARGEST_NUMBER + 1), "none above 1,073,741,824, got 1073741825 after 0 others"),
    (f"1,1x{MOST_NUMBERS}", "at most 1,048,576 and none above"),
])  # fmt: skip
def test_what_is_no_number_is_refused(text: str, part: str) -> None:
    with pytest.raises(UsageError) as error:
        numbers(text)
    assert part in str(error.value)


def test_the_nearest_word() -> None:
    assert nearest("causl", ["full", "causal"]) == "did you mean causal?"
    assert nearest("xyz", ["full", "causal"]) == ""


def test_the_nearest_option_is_named() -> None:
    here = CommandParser(prog="magi here")
    here.add_argument("--window")
    assert here.hint("--zzz") == ""
    with pytest.raises(UsageError, match="magi here has no option --windw; did you mean --window"):
        here.parse_args(["--windw", "3"])


def test_a_word_that_no_option_takes_is_refused() -> None:
    with pytest.raises(UsageError, match="magi takes no further argument, got 'more'"):
        CommandParser(prog="magi").parse_args(["more"])
