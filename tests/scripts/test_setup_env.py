"""What scripts/setup_env.sh says before it is silent for minutes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
    first, second = done.stdout.splitlines()
    assert first == "installing megatron_magi[quickstart] and megatron-core 0.19.2"
    assert second.startswith("meanwhile the C++ planner is compiled, once and silently: about ")
    calls = python.with_name("python.calls").read_text()
    assert "--ignore-requires-python --only-binary=:all: megatron-core==0.19.2" in calls
    assert calls.index("--no-deps -e .") < calls.index("megatron-magi[quickstart]")


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("answers", [False, True])
def test_the_cpu_build_of_torch_is_preferred_without_a_gpu(
    tmp_path: Path, has_gpu: bool, answers: bool
) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\necho "$@" >>"$0.calls"\ncase "$*" in\n'
        f"  *torch.__version__*) exit 1 ;;\n  *urllib*) exit {int(not answers)} ;;\nesac\n"
    )
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "timeout"):
        (commands / name).symlink_to(str(shutil.which(name)))
    if has_gpu:
        (commands / "nvidia-smi").symlink_to(commands / "cat")
    python.chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "setup_env.sh"), str(tmp_path / "venv"), "quickstart"]
    done = subprocess.run(
        command, env={"PATH": str(commands)}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    (said,) = (line for line in done.stdout.splitlines() if "torch 2.13.0" in line)
    calls = python.with_name("python.calls").read_text().splitlines()
    (install,) = (call for call in calls if "torch==2.13.0" in call)
    if has_gpu:
        assert "with CUDA" in said
    else:
        assert ("for the CPU" in said, "PyPI's" in said) == (answers, not answers)
    assert ("/whl/cpu" in install) == (answers and not has_gpu)


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
