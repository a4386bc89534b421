"""Install the package in fresh environments; see what a newcomer sees where something is missing.

    python -m tools.check_install

Compiles the planner twice (minutes), so it is no part of the tests; tests/test_install.py holds the
same sentences without pip. Needs pip, setuptools, pybind11 and torch in this Python; downloads
nothing: the environments borrow this Python's packages.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("megatron_magi", "recipes", "setup.py", "pyproject.toml", "README.md", "MANIFEST.in")
BUILD_TOOLS = ("setuptools", "pkg_resources", "_distutils_hack", "pybind11", "wheel", "pip")
FAKE_NVCC = """#!/bin/sh
echo "Cuda compilation tools, release 12.9, V12.9.0"
while [ $# -gt 1 ]; do [ "$1" = -o ] && touch "$2"; shift; done
"""


@dataclass(frozen=True)
class Environment:
    """A fresh virtual environment and where its commands start."""

    folder: Path

    def run(self, *command: str, cwd: Path, **variables: str) -> tuple[int, str]:
        """Exit code and everything printed; `command[0]` is a program of the environment."""
        done = subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=cwd,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder), **variables},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    def install(self, *arguments: str) -> tuple[int, str]:
        pip = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
        return self.run("python", *pip, *arguments, cwd=self.folder)


def environment(folder: Path, borrowed: Sequence[str] | None) -> Environment:
    """A new one with `borrowed` packages of this Python; None: with all of them."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    ours = Path(sysconfig.get_path("purelib"))
    if borrowed is None:
        (site / "borrowed.pth").write_text(f"{ours}\n")
    for name in borrowed or ():
        for path in [*ours.glob(name), *ours.glob(f"{name}-*.dist-info")]:
            (site / path.name).symlink_to(path)
    return Environment(folder)


class Report:
    """Counts what is not as it must be, and prints all of it."""

    def __init__(self) -> None:
        self.num_failed = 0

    def expect(self, what: str, got: tuple[int, str], code: int, *texts: str) -> None:
        missing = [text for text in texts if text not in got[1]]
        ok = got[0] == code and not missing
        self.num_failed += not ok
        print(f"{'ok' if ok else 'FAILED'}  {what}", flush=True)
        if not ok:
            print(f"        exit code {got[0]} for {code}, without {missing}:\n{got[1][-3000:]}")


def copied_checkout(folder: Path) -> Path:
    """The sources alone, without what was built."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder


def check_bare(report: Report, scratch: Path, checkout: Path) -> None:
    """pip install without torch and numpy."""
    no_pybind = environment(scratch / "no_pybind", [n for n in BUILD_TOOLS if n != "pybind11"])
    report.expect("pip install without pybind11 names it", no_pybind.install(str(checkout)), 1,
                  "building megatron_magi needs pybind11")  # fmt: skip
    bare = environment(scratch / "bare", BUILD_TOOLS)
    report.expect("pip install . without torch", bare.install(str(checkout)), 0)
    for command in (["megatron-magi"], ["python", "-m", "megatron_magi"]):
        name = " ".join(command)
        report.expect(f"{name} --version", bare.run(*command, "--version", cwd=scratch), 0, "0.1.")
        report.expect(f"{name} --help", bare.run(*command, "--help", cwd=scratch), 0, "doctor")
        report.expect(f"{name} doctor", bare.run(*command, "doctor", cwd=scratch), 1,
                      "!!  torch", "pip install torch", "planner compiled")  # fmt: skip
    report.expect("import says what to do", bare.run("python", "-c", "import megatron_magi",
                  cwd=scratch), 1, "MissingRequirement: megatron_magi needs numpy")  # fmt: skip
    report.expect("plan says it in one line", bare.run("megatron-magi", "plan", "--lengths", "64",
                  "--cp", "2", cwd=scratch), 2, "error: megatron_magi needs")  # fmt: skip


def check_full(report: Report, scratch: Path, checkout: Path) -> None:
    """pip install beside torch; then the checkout; then pip install -e over a built library."""
    full = environment(scratch / "full", None)
    where = ["python", "-c", "import megatron_magi; print(megatron_magi.__file__)"]
    report.expect("pip install . beside torch", full.install(str(checkout)), 0)
    report.expect(
        "it works outside the checkout", full.run(*where, cwd=scratch), 0, "site-packages"
    )
    report.expect("the checkout hides it, and says so", full.run(*where, cwd=checkout), 1,
                  f"got {checkout / 'megatron_magi'} without it", "an installed copy",
                  "site-packages")  # fmt: skip
    cuda = scratch / "cuda"
    (cuda / "bin").mkdir(parents=True)
    (cuda / "bin" / "nvcc").write_text(FAKE_NVCC)
    (cuda / "bin" / "nvcc").chmod(0o755)
    for cwd in (scratch, checkout):
        built = full.run("python", "-m", "megatron_magi.build", cwd=cwd, CUDA_HOME=str(cuda))
        report.expect(f"megatron_magi.build in {cwd.name}", built, 0, "megatron_magi.libs")
    report.expect("pip install -e .", full.install("-e", str(checkout)), 0)
    for cwd in (scratch, checkout):
        report.expect(f"it is the checkout, from {cwd.name}", full.run(*where, cwd=cwd), 0,
                      str(checkout / "megatron_magi" / "__init__.py"))  # fmt: skip


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="megatron-magi-install-") as name:
        scratch = Path(name)
        checkout = copied_checkout(scratch / "checkout")
        check_bare(report, scratch, checkout)
        check_full(report, scratch, checkout)
    return 1 if report.num_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
