"""What setup.py puts into a wheel beside the modules."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_a_built_package_holds_every_recipe(tmp_path: Path) -> None:
    pytest.importorskip("pybind11", reason="setup.py needs it")
    built = tmp_path / "lib"
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    done = subprocess.run(
        [*command, "build_py", "--build-lib", str(built)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    texts = {p.name: p.read_text() for p in (built / "megatron_magi" / "recipes").iterdir()}
    assert texts == {p.name: p.read_text() for p in (ROOT / "recipes").glob("*.yaml")}
