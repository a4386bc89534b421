"""Builds the C++ planner and packs the recipes. Needs a C++20 compiler; no torch, no CUDA.

The CUDA library has a plain C ABI and is built by ``python -m megatron_magi.build``. A wheel that
is made after that holds it.
"""

from glob import glob
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.build_py import build_py

try:
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
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


class BuildWithFolders(build_py):
    """Also copies recipes/ into the package, where an installed `--recipe NAME` looks, the pretrain
    script of examples/, and next to the package a CUDA library of these sources, if one was built:
    then nothing is compiled later.

    An editable install needs no copy: it finds the folders beside the package.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self._copy([*glob("recipes/*.yaml"), *glob("recipes/*.py")], "megatron_magi/recipes")
            self._copy(["examples/pretrain_gpt.py"], "megatron_magi/examples")
            library = _build_module().built_library()
            self._copy([] if library is None else [str(library)], "megatron_magi.libs")

    def _copy(self, paths: list[str], folder: str) -> None:
        for path in paths:
            target = Path(self.build_lib, folder)
            target.mkdir(parents=True, exist_ok=True)
            self.copy_file(path, str(target))


def _build_module() -> ModuleType:
    """megatron_magi/build.py without its package, which needs torch and what is built here."""
    spec = spec_from_file_location("build_of_magi", "megatron_magi/build.py")
    assert spec is not None and spec.loader is not None, "the file is there"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# As many files at once as the machine has cores; each compiler takes up to 1 GB.
ParallelCompile("MAX_JOBS", max=16).install()
setup(ext_modules=[solver], cmdclass={"build_ext": build_ext, "build_py": BuildWithFolders})
