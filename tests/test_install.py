"""What somebody sees whose environment lacks something: fresh ones, without pip or a compiler."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from megatron_magi import _solver

ROOT = Path(__file__).parent.parent
CONSOLE = "import sys\nfrom megatron_magi.cli import main\nsys.exit(main())\n"
NVCC = """#!/bin/sh
echo "Cuda compilation tools, release 12.9, V12.9.0"
while [ $# -gt 1 ]; do [ "$1" = -o ] && touch "$2"; shift; done
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip, and what is in it."""

    folder: Path

    @property
    def site(self) -> Path:
        return next((self.folder / "lib").glob("python*/site-packages"))

    def run(
        self, *arguments: str, cwd: Path | None = None, **variables: str
    ) -> tuple[int, str, str]:
        """Exit code, output and errors of its Python, or of its `megatron-magi`."""
        python = str(self.folder / "bin" / "python")
        given = list(arguments)
        if given[0] == "megatron-magi":
            given[0] = str(self.folder / "bin" / "megatron-magi")
        done = subprocess.run(
            [python, *given], cwd=cwd or self.folder, capture_output=True, text=True, env=variables
        )
        return done.returncode, done.stdout, done.stderr

    def last_line(self, code: str, cwd: Path | None = None) -> str:
        """Of what a failing program says."""
        ended, _, err = self.run("-c", code, cwd=cwd)
        assert ended == 1, err
        return err.splitlines()[-1]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a wheel would unpack, with this Python's planner."""
    pytest.importorskip("pybind11", reason="setup.py needs it")
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run([*command, "build_py", "--build-lib", str(folder / "lib")], cwd=ROOT, check=True)
    shutil.copy(_solver.__file__, folder / "lib" / "megatron_magi")
    return folder / "lib" / "megatron_magi"


def environment(folder: Path, package: Path | None, *borrowed: str) -> Environment:
    """With `package` installed and `borrowed` packages of this Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    made = Environment(folder)
    if package is not None:
        shutil.copytree(package, made.site / "megatron_magi")
        (folder / "bin" / "megatron-magi").write_text(CONSOLE)
    ours = Path(numpy.__file__).parents[1]  # also where this Python borrows from another
    for path in [path for name in borrowed for path in ours.glob(name)]:
        (made.site / path.name).symlink_to(path)
    return made


@pytest.fixture(scope="module")
def bare(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Without numpy and torch, as `pip install --no-deps` leaves it."""
    return environment(tmp_path_factory.mktemp("bare") / "env", package)


@pytest.fixture(scope="module")
def torchless(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With numpy, without torch, as `pip install .` leaves it."""
    return environment(tmp_path_factory.mktemp("torchless") / "env", package, "numpy", "numpy.libs")


@pytest.mark.parametrize("command", [["megatron-magi"], ["-m", "megatron_magi"]], ids=" ".join)
@pytest.mark.parametrize("env", ["bare", "torchless"])
def test_version_help_and_doctor_need_nothing(
    request: pytest.FixtureRequest, command: list[str], env: str
) -> None:
    here: Environment = request.getfixturevalue(env)
    assert here.run(*command, "--version") == (0, "megatron_magi 0.1.0\n", "")
    code, out, err = here.run(*command, "--help")
    assert (code, err) == (0, "") and "doctor" in out and "compare" in out
    code, out, err = here.run(*command, "plan", "--help")
    assert (code, err) == (0, "") and "--chunk-size" in out
    code, out, err = here.run(*command, "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert (code, err) == (1, "") and checks["megatron_magi"]["found"].endswith("planner compiled")
    assert (
        checks["torch"]["status"] == "problem"
        and "pip install torch" in (checks["torch"]["advice"])
    )
    assert checks["numpy"]["status"] == ("ok" if env == "torchless" else "problem")
    code, out, err = here.run(*command, "doctor")
    assert (code, err) == (1, "") and "\n!!  torch " in out and "not ready: " in out


@pytest.mark.parametrize("arguments", [
    "plan --lengths 64 --cp 2", "viz --lengths 64 --cp 2", "compare a b",
])  # fmt: skip
def test_other_commands_say_it_in_one_line(bare: Environment, arguments: str) -> None:
    code, out, err = bare.run("megatron-magi", *arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ") and " needs " in err and "install" in err


@pytest.mark.parametrize("code", [
    "import megatron_magi", "from megatron_magi import plan", "import megatron_magi.core.mask",
    "import megatron_magi.magi_attention", "import megatron_magi.adapter.layer_spec",
    "import megatron_magi.viz.plan_facts",
])  # fmt: skip
def test_imports_without_torch_are_one_sentence(torchless: Environment, code: str) -> None:
    last = torchless.last_line(code)
    assert last.startswith(
        "megatron_magi.requirements.MissingRequirement: megatron_magi needs torch, got none in "
    )
    assert "; pip install torch" in last


def test_public_names_without_torch_are_the_same_sentence(torchless: Environment) -> None:
    code = "import sys; sys.argv = ['-m']; import megatron_magi as magi; magi.{}"
    assert "MissingRequirement: megatron_magi needs torch" in torchless.last_line(
        code.format("dist_attn")
    )
    assert "AttributeError: module 'megatron_magi' has no attribute 'nothing'" in (
        torchless.last_line(code.format("nothing"))
    )


def test_a_torch_that_cannot_be_loaded_says_why(package: Path, tmp_path: Path) -> None:
    broken = environment(tmp_path / "env", package, "numpy", "numpy.libs")
    (broken.site / "torch.py").write_text("raise OSError('libcudart.so.13: no such file')\n")
    last = broken.last_line("import megatron_magi")
    assert "needs a working torch, got from its import: libcudart.so.13" in last


@pytest.fixture(scope="module")
def checkout(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources whose planner was never compiled."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(package, folder / "megatron_magi", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "setup.py", folder)
    return folder


def test_a_checkout_in_front_of_an_installed_copy(
    package: Path, checkout: Path, tmp_path: Path
) -> None:
    full = environment(tmp_path / "env", package)
    last = full.last_line("import megatron_magi", cwd=checkout)
    assert f"got {checkout / 'megatron_magi'} without it" in last
    assert f"an installed copy with a planner is in {full.site / 'megatron_magi'}" in last
    assert f"start Python outside {checkout}" in last and f"-m pip install -e {checkout}`" in last
    code, out, _ = full.run("-m", "megatron_magi", "doctor", cwd=checkout)
    assert code == 1 and "!!  megatron_magi" in out and "start Python outside" in out


def test_a_checkout_alone_and_a_planner_of_another_python(checkout: Path, tmp_path: Path) -> None:
    alone = environment(tmp_path / "env", None)
    other = checkout / "megatron_magi" / "_solver.cpython-27-x86_64-linux-gnu.so"
    last = alone.last_line("import megatron_magi", cwd=checkout)
    assert last.endswith(f"without it; run `python -m pip install -e {checkout}`")
    other.touch()
    try:
        last = alone.last_line("import megatron_magi", cwd=checkout)
        assert "that is not for this Python" in last and other.name in last
    finally:
        other.unlink()


def test_what_pip_leaves_behind_is_no_package(package: Path, tmp_path: Path) -> None:
    """A library that was built beside an installed copy, which pip then takes away."""
    env = environment(tmp_path / "env", package)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    installed = [p for p in (env.site / "megatron_magi").rglob("*") if p.is_file()]
    variables = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": "/usr/bin:/bin", "HOME": "/nowhere"}
    code, out, err = env.run("-m", "megatron_magi.build", **variables)
    assert code == 0 and Path(out.strip()).parent == env.site / "megatron_magi.libs", err
    for path in [*installed, *(env.site / "megatron_magi").rglob("*.pyc")]:
        path.unlink(missing_ok=True)
    for folder in sorted((env.site / "megatron_magi").rglob("*"), reverse=True):
        folder.rmdir()
    (env.site / "megatron_magi").rmdir()
    assert "No module named 'megatron_magi'" in env.last_line("import megatron_magi")


def test_building_without_pybind11_says_so() -> None:
    code = (
        "import sys, runpy; sys.modules['pybind11'] = None; sys.argv = ['setup.py', '--version']; "
        "runpy.run_path('setup.py')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("building megatron_magi needs pybind11, got none")
