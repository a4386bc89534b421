"""Without the compiled planner the package says what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_missing_extension_is_one_clear_error() -> None:
    code = "import sys; sys.modules['megatron_magi._solver'] = None; import megatron_magi"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs its compiled planner" in done.stderr and "pip install -e /" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "megatron_magi.requirements.MissingRequirement: "
    )


@pytest.mark.slow
def test_the_types_of_the_planner_are_those_of_its_module(tmp_path: Path) -> None:
    """`_solver.pyi` against the compiled module: names, arguments, defaults, properties.

    Classes of pybind11 have a metaclass that a stub cannot name, and a constructor that refuses.
    """
    pytest.importorskip("mypy", reason="the comparison is mypy's")
    module = r"megatron_magi\._solver\."
    allowed = tmp_path / "allowed"
    allowed.write_text(
        f"{module}(StageCosts|Layout|(Fwd|Bwd)Alternatives)\n"
        f"{module}((Fwd|Bwd)WorkList|FwdChoice)(.__init__)?"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "megatron_magi._solver",
         "--ignore-positional-only", "--allowlist", str(allowed), "--ignore-unused-allowlist",
         "--mypy-config-file", str(ROOT / "pyproject.toml")],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
