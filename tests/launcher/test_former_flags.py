"""Flags that Megatron had, and what it has instead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_magi.launcher import megatron_flags
from megatron_magi.launcher.former_flags import FORMER_FLAGS
from tests.launcher.test_megatron_flags import needs_training

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
