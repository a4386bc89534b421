"""What is missing is one sentence with its remedy, and is only said where it matters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_magi import dist_attn, requirements
from megatron_magi.requirements import MissingRequirement

SUFFIX = requirements.EXTENSION_SUFFIXES[0]


def test_a_package_that_is_there_is_returned() -> None:
    assert requirements.check_package("numpy") is sys.modules["numpy"]


def test_a_package_that_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    text = rf"^megatron_magi needs torch, got none in {sys.executable}; pip install torch, in the"
    with pytest.raises(MissingRequirement, match=text):
        requirements.check_package("torch")


@pytest.mark.parametrize(
    "line, said",
    [
        ("raise OSError('libcudart.so: cannot\\n  open')", "libcudart.so: cannot open"),
        ("import no_such_package_of_ours", "No module named 'no_such_package_of_ours'"),
        ("raise ImportError", "ImportError"),
    ],
    ids=["library", "its own requirement", "no words"],
)
def test_a_package_that_cannot_be_loaded_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, said: str
) -> None:
    (tmp_path / "numpy.py").write_text(line + "\n")
    monkeypatch.delitem(sys.modules, "numpy")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingRequirement) as error:
        requirements.check_package("numpy")
    assert str(error.value) == (
        f"megatron_magi needs a working numpy, got from its import: {said}; "
        f"install it anew: pip install numpy"
    )


def test_any_failed_import_is_explained() -> None:
    other = ModuleNotFoundError("No module named 'omegaconf'", name="omegaconf")
    text = f"this needs omegaconf, got none in {sys.executable}; install it"
    assert requirements.explained(other) == text
    cut = ImportError("cannot import name 'a'\nfrom 'b'", name="b")
    assert requirements.explained(cut) == "cannot import name 'a' from 'b'"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of this package's folder whose planner was not compiled; nothing else is on the
    path."""
    folder = tmp_path / "here" / "megatron_magi"
    folder.mkdir(parents=True)
    monkeypatch.setattr(requirements, "PACKAGE", folder)
    monkeypatch.setitem(sys.modules, "megatron_magi._solver", None)
    monkeypatch.setattr(sys, "path", [str(folder.parent)])
    return folder


def planner_error() -> str:
    with pytest.raises(MissingRequirement) as error:
        requirements.check_planner()
    return str(error.value)


def test_the_planner_is_compiled_here() -> None:
    assert isinstance(requirements.check_planner(), ModuleType)


def test_the_planner_is_looked_for_before_any_package(package: Path) -> None:
    with pytest.raises(MissingRequirement, match="needs its compiled planner"):
        requirements.check_requirements.__wrapped__()


def test_an_installed_package_without_its_planner_is_installed_anew(package: Path) -> None:
    assert planner_error() == (
        f"megatron_magi needs its compiled planner, got {package} without it; "
        f"install megatron_magi anew with this Python's pip"
    )


def test_a_planner_that_does_not_load_is_said_to_be_there(package: Path) -> None:
    (package / f"_solver{SUFFIX}").touch()
    said = planner_error()
    assert f"got one in {package} that does not load (" in said
    assert "an installed copy" not in said, "this one is no other copy"


@pytest.mark.parametrize(
    "argv, starts",
    [
        (["-m", "doctor"], True),
        (["/usr/bin/megatron-magi", "plan"], True),
        (["train.py"], False),
        (["-c"], False),
        ([], False),
    ],
)
def test_a_command_says_itself_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], starts: bool
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert requirements.starts_a_command() is starts


def test_names_that_cannot_be_imported_raise_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = requirements.at_first_use(["dist_attn"])
    assert load("dist_attn") is dist_attn
    with pytest.raises(AttributeError, match="module 'megatron_magi' has no attribute 'nothing'"):
        load("nothing")
    missing = MissingRequirement("megatron_magi needs torch")

    def fail(name: str) -> ModuleType:
        raise missing

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(MissingRequirement) as error:
        load("dist_attn")
    assert error.value is missing
