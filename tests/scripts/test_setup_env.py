"""What scripts/setup_env.sh says before it is silent for minutes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
# In place of an environment's Python: it has everything, and is new or old.
case "$*" in *"(3, 12)"*) exit {is_new};; esac
"""


@pytest.mark.parametrize("is_new", [True, False])
def test_it_says_what_is_installed_and_how_long_it_takes(tmp_path: Path, is_new: bool) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(is_new=int(is_new)))
    python.chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "setup_env.sh"), str(tmp_path / "venv"), "quickstart"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    pin = "0.19.2" if is_new else "0.16.1"
    first, *note, last = done.stdout.splitlines()
    assert first == f"installing megatron_magi[quickstart] and megatron-core {pin}"
    assert last.startswith("then the C++ planner is compiled, once and silently: about ")
    assert bool(note) == (not is_new)
    if note:
        assert "--attention-backend magi refuses megatron-core 0.16.1" in note[0]
        assert "3.12 is best, and 0.19.2's wheel works on 3.11" in note[0]
