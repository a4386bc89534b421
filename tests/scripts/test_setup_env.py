"""What scripts/setup_env.sh says before it is silent for minutes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
# In place of an environment's Python: it has everything.
echo "$@" >>"$0.calls"
"""


def test_it_says_what_is_installed_and_how_long_it_takes(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "setup_env.sh"), str(tmp_path / "venv"), "quickstart"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    first, last = done.stdout.splitlines()
    assert first == "installing megatron_magi[quickstart] and megatron-core 0.19.2"
    assert last.startswith("then the C++ planner is compiled, once and silently: about ")
    calls = python.with_name("python.calls").read_text()
    assert "--ignore-requires-python --only-binary=:all: megatron-core==0.19.2" in calls


def test_an_old_python_is_one_line(tmp_path: Path) -> None:
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        (tmp_path / name).write_text(
            '#!/bin/sh\n[ "$1" = --version ] && exec echo Python 3.10.1\nexit 1\n'
        )
        (tmp_path / name).chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "setup_env.sh"), str(tmp_path / "venv"), "quickstart"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        command, env={**os.environ, "PATH": path, "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "\n" not in done.stderr.rstrip("\n")
    assert done.stderr.startswith("error: Python 3.11 or later is required, got Python 3.10.1")
