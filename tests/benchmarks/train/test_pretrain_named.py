"""Weights that are drawn by name, in processes that have a Megatron checkout before us."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.megatron_worker import NO_COMPILER

ROOT = Path(__file__).parents[3]
BUILD = """
from megatron_magi.launcher.preflight import prepare_megatron
prepare_megatron()
from benchmarks.train.pretrain_named import with_named_weights
print(with_named_weights(print).__closure__ is not None)
"""


def test_a_checkouts_own_examples_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "__init__.py").touch()
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-W", "ignore", "-c", BUILD]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **NO_COMPILER, **paths},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("True\n"), done.stderr
