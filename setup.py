"""Builds the C++ planner. Needs a C++20 compiler; no torch, no CUDA.

The CUDA library has a plain C ABI and is built by ``python -m megatron_magi.build``.
"""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

solver = Pybind11Extension(
    "megatron_magi._solver",
    sorted(glob("megatron_magi/csrc/bindings*.cpp") + glob("megatron_magi/csrc/solver/*.cpp")),
    include_dirs=["megatron_magi/csrc"],
    depends=glob("megatron_magi/csrc/solver/*.h"),
    cxx_std=20,
    extra_compile_args=["-O3", "-Wall", "-Wextra"],
)

setup(ext_modules=[solver], cmdclass={"build_ext": build_ext})
