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

solver = Pybind11Extension(
    "megatron_magi._solver",
    sorted(glob("megatron_magi/csrc/bindings*.cpp") + glob("megatron_magi/csrc/solver/*.cpp")),
    include_dirs=["megatron_magi/csrc"],
    depends=glob("megatron_magi/csrc/*.h") + glob("megatron_magi/csrc/solver/*.h"),
    cxx_std=20,
    extra_compile_args=["-O3", "-Wall", "-Wextra"],
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
