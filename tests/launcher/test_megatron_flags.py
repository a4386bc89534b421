"""Flags that Megatron no longer has are named with what it has instead."""

from __future__ import annotations

import pytest

import megatron_magi.adapter
from megatron_magi.launcher import megatron_flags

HAS_TRAINING = megatron_magi.adapter.MEGATRON_VERSION[:2] == (0, 19)
needs_training = pytest.mark.skipif(not HAS_TRAINING, reason="the 0.19 wheel has the parser")


@needs_training
@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--rotary-base=500000.0"], ["write 500000; mend it"]),
        (["--num-layers", "two", "--lr", "x"], ["--num-layers: invalid int", "--lr: invalid"]),
        (["--save", "--lr", "1"], ["--save: expected one argument; mend it"]),
        (["--transformer-impl", "te", "--seq-len", "8"], ["(now --seq-length)", "invalid choice"]),
    ],
)
def test_every_fault_is_a_line(words: list[str], lines: list[str]) -> None:
    args, found = megatron_flags.read_flags(words)
    assert len(found) == len(lines)
    assert all(part in line for part, line in zip(lines, found, strict=True))
    assert args.rotary_base in (10000, 500000)


@needs_training
def test_a_whole_number_is_read_as_an_integer() -> None:
    args, _ = megatron_flags.read_flags(["--rotary-base", "500000.0"])
    assert args.rotary_base == 500000


@needs_training
@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_flag_of_the_script_is_no_fault(quote: str) -> None:
    words = ["--own", "3", "--other", "4"]
    _, lines = megatron_flags.read_flags(words, f"add_argument({quote}--own{quote})")
    assert "--other" in lines[0] and "--own" not in lines[0]


@needs_training
@pytest.mark.parametrize("word", ["", " ", "own"])
def test_a_word_that_no_flag_takes_is_a_fault(word: str) -> None:
    """Also one that the script has in quotes: "" begins its docstring."""
    _, lines = megatron_flags.read_flags(["--lr", "1", word], f'"""Says "{word}".""" ')
    assert f"unrecognized arguments: {word.strip() or repr(word)}; mend them" in lines[0]
