"""Builds the C++ planner and packs the recipes. Needs a C++20 compiler; no torch, no CUDA.

The CUDA library has a plain C ABI and is built by ``python -m megatron_magi.build``.
"""

from glob import glob
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

try:
    from pybind11.setup_helpers import Pybind11Extension, build_ext
except ModuleNotFoundError:
    raise SystemExit(
        "building megatron_magi needs pybind11, got none in this Python; pip install pybind11, or "
        "leave out --no-build-isolation so that pip brings it"
    ) from None

CSRC = "megatron_magi/csrc"


def _files(suffix: str) -> list[str]:
    """The files of the extension: the bindings, the planner and the kernels' work lists."""
    return sorted(
        p for room in ("", "planner/", "schedule/") for p in glob(f"{CSRC}/{room}*{suffix}")
    )


solver = Pybind11Extension(
    "megatron_magi._solver",
    _files(".cpp"),
    include_dirs=[CSRC],
    depends=_files(".h"),
    cxx_std=20,
    # Plans must be equal on every rank: without contraction, sums of floats round alike everywhere.
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off"],
)


class BuildWithRecipes(build_py):
    """Also copies recipes/ into the package, where an installed `megatron-magi train NAME` looks.

    An editable install needs no copy: it finds the folder beside the package.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "megatron_magi", "recipes")
            folder.mkdir(parents=True, exist_ok=True)
            for path in glob("recipes/*.yaml"):
                self.copy_file(path, str(folder))


setup(ext_modules=[solver], cmdclass={"build_ext": build_ext, "build_py": BuildWithRecipes})
