"""Flags that Megatron no longer has are named with what it has instead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_magi.adapter
from megatron_magi.launcher import megatron_flags
from megatron_magi.launcher.former_flags import FORMER_FLAGS

HAS_TRAINING = megatron_magi.adapter.MEGATRON_VERSION[:2] == (0, 19)
needs_training = pytest.mark.skipif(not HAS_TRAINING, reason="the 0.19 wheel has the parser")
ROOT = Path(__file__).parents[2]
KNOWN_TO_0_17 = {"--use-legacy-models", "--no-scatter-gather-tensors-in-pipeline"}
PRINT_FLAGS = """
from megatron_magi.launcher.preflight import prepare_megatron
from megatron_magi.launcher.megatron_flags import megatron_parser
prepare_megatron()
print(*megatron_parser()._option_string_actions)
"""


def assert_table_fits(known: set[str]) -> None:
    assert known & set(FORMER_FLAGS) <= KNOWN_TO_0_17
    named = {flag for text in FORMER_FLAGS.values() for flag in re.findall(r"--[\w-]+", text)}
    assert named <= known


@needs_training
def test_the_table_names_flags_of_this_megatron() -> None:
    assert_table_fits(set(megatron_flags.megatron_parser()._option_string_actions))


@pytest.mark.megatron_checkout
def test_the_table_names_flags_of_the_checkout(megatron_checkout: Path) -> None:
    path = os.pathsep.join([str(megatron_checkout), str(ROOT), os.environ.get("PYTHONPATH", "")])
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRINT_FLAGS],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert_table_fits(set(printed.stdout.splitlines()[-1].split()))


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
