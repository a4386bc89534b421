"""What setup.py puts into a wheel beside the modules, and what a source distribution holds."""

import os
import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pytest

import megatron_magi
from megatron_magi import build

ROOT = Path(__file__).parent.parent


LIBRARY = f"libmagi_attention-{build._sources_key()}-0123456789ab.so"
"""A library of these sources that another compiler made."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with lib/ as in a wheel, and with the metadata that it is made from.

    A small file stands for the CUDA library, and another one for a library of other sources.
    """
    pytest.importorskip("pybind11", reason="setup.py needs it")
    folder = tmp_path_factory.mktemp("built")
    libraries = tmp_path_factory.mktemp("libraries")
    (libraries / LIBRARY).write_text("a library")
    (libraries / "libmagi_attention-0123456789ab-0123456789ab.so").touch()
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    done = subprocess.run(
        [*command, "build_py", "--build-lib", str(folder / "lib")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "MAGI_BUILD_DIR": str(libraries)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_a_built_package_holds_every_recipe(built: Path) -> None:
    recipes = built / "lib" / "megatron_magi" / "recipes"
    texts = {str(p.relative_to(recipes)): p.read_text() for p in recipes.rglob("*.*")}
    mine = ROOT / "recipes"
    files = [p for p in mine.rglob("*.*") if "__pycache__" not in p.parts]
    assert texts == {str(p.relative_to(mine)): p.read_text() for p in files}


def test_a_built_package_holds_the_pretrain_script(built: Path) -> None:
    examples = built / "lib" / "megatron_magi" / "examples"
    text = (ROOT / "examples" / "pretrain_gpt.py").read_text()
    assert {p.name: p.read_text() for p in examples.iterdir()} == {"pretrain_gpt.py": text}


def test_a_built_package_says_that_it_is_typed(built: Path) -> None:
    assert (built / "lib" / "megatron_magi" / "py.typed").exists()


def test_a_built_package_is_ours_alone(built: Path) -> None:
    """Benchmarks, tools and scripts are of the checkout: their names are too common to install."""
    assert {p.name for p in (built / "lib").iterdir()} == {"megatron_magi", "megatron_magi.libs"}


def test_a_built_package_holds_the_library_and_finds_it(built: Path) -> None:
    """Beside the package, where it is found before a compiler is asked for."""
    (library,) = (built / "lib" / "megatron_magi.libs").iterdir()
    assert (library.name, library.read_text()) == (LIBRARY, "a library")
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('alone', sys.argv[1])\n"
        "build = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(build)\n"
        "print(build.library_path())\n"
    )
    command = [sys.executable, "-c", code, str(built / "lib" / "megatron_magi" / "build.py")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(built / "cache"), "CUDA_HOME": str(built)}
    environment.pop("MAGI_BUILD_DIR", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == str(library), done.stderr


def test_a_wheel_without_a_library_has_no_folder_for_it(tmp_path: Path) -> None:
    pytest.importorskip("pybind11", reason="setup.py needs it")
    environment = {**os.environ, "MAGI_BUILD_DIR": str(tmp_path / "none")}
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    command += ["build_py", "--build-lib", str(tmp_path / "lib")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [path.name for path in (tmp_path / "lib").iterdir()] == ["megatron_magi"]


def test_a_source_distribution_holds_the_checkout(built: Path) -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("the list of files is git's")
    (sources,) = built.glob("*.egg-info/SOURCES.txt")
    held = set(sources.read_text().splitlines())
    assert {name for name in done.stdout.splitlines() if (ROOT / name).is_file()} <= held
    assert not [name for name in held if name.endswith((".so", ".pyc"))]


def test_metadata_says_who_what_and_for_whom(built: Path) -> None:
    (path,) = built.glob("*.egg-info/PKG-INFO")
    metadata = Parser().parsestr(path.read_text())
    assert metadata["Version"] == megatron_magi.__version__
    assert "megatron_magi" in metadata["Author"] and "attention" in metadata["Keywords"]
    classifiers = metadata.get_all("Classifier") or []
    assert "Programming Language :: Python :: 3.12" in classifiers
    assert not any(c.startswith("License") for c in classifiers), "the license is an expression"


def test_the_citation_is_of_this_version() -> None:
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {megatron_magi.__version__}" in lines and "license: Apache-2.0" in lines
