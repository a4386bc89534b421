"""The script that compares the hook table with a Megatron names every hook that does not fit."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.adapter.compat import MegatronVersion
from megatron_magi.launcher.hook_points import HOOK_POINTS, HookPoint
from tests.megatron_worker import NO_COMPILER

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_hooks.py"
IN_THE_TABLE = pytest.mark.skipif(
    MEGATRON_VERSION[:2] != (0, 19), reason="needs megatron.training of the 0.19 wheel"
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_hooks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, since it decides what Megatron is imported."""
    command = [sys.executable, SCRIPT, *map(str, flags)]
    env = {**os.environ, **NO_COMPILER}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


def megatron_folder() -> Path:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).parent


def copy_with_version(folder: Path, version: MegatronVersion) -> Path:
    """This Megatron under another version, by links to its files."""
    here = megatron_folder()
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    for each in (here / "core").iterdir():
        (core / each.name).symlink_to(each)
    (folder / "megatron" / "training").symlink_to(here / "training")
    info = (here / "core" / "package_info.py").read_text()
    (core / "package_info.py").unlink()
    (core / "package_info.py").write_text(f"{info}\nVERSION = {(*version, '')}\n")
    return folder


def row(name: str) -> HookPoint:
    return next(point for point in HOOK_POINTS if point.name == name)


def rows_of_output(output: str) -> dict[str, str]:
    """What is said of each point."""
    lines = output.splitlines()[1:]
    points = [line.split(None, 2) for line in lines if line.split()[1].startswith("megatron.")]
    return {name: said for name, _, said in points}


@IN_THE_TABLE
def test_every_point_of_the_wheel_fits() -> None:
    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"Megatron {MEGATRON_VERSION} from {megatron_folder().parent}")
    assert set(rows_of_output(result.stdout).values()) == {"ok"}
    assert {"settings", "batch", "gpt", "save"} < set(rows_of_output(result.stdout))
    assert result.stdout.splitlines()[-1] == "every hook point fits"


@IN_THE_TABLE
def test_an_unknown_version_is_compared_with_the_nearest_rows(tmp_path: Path) -> None:
    result = run("--megatron", copy_with_version(tmp_path, MegatronVersion(0, 21, 0)))
    rows = rows_of_output(result.stdout)
    assert f"Megatron 0.21.0 from {tmp_path}" in result.stdout
    # The newest row is of 0.20, and these files are of 0.19.
    newest = ["scheduled-batch", "delta-product"]
    assert [name for name, said in rows.items() if said != "ok"] == newest
    assert result.returncode == 1
    assert "got other code at scheduled-batch, delta-product; change these rows" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert "the table does not know 0.21.0: it was compared with the rows of 0.20" in last
    assert "set LAST and SUPPORTED in" in last and "and SUPPORTED_MINORS and" in last


def test_a_renamed_function_is_named(script: ModuleType, capsys: pytest.CaptureFixture) -> None:
    renamed = dataclasses.replace(row("gpt-forward"), attribute="GPTModel.forward_of_old")
    assert script.print_rows([row("gpt"), renamed]) == ["gpt-forward"]
    gpt, forward = capsys.readouterr().out.splitlines()
    assert gpt.startswith("gpt ") and gpt.endswith(" ok")
    assert forward.startswith("gpt-forward  ") and "has no attribute 'forward_of_old'" in forward


def test_a_missing_parameter_is_named(script: ModuleType, capsys: pytest.CaptureFixture) -> None:
    point = row("gpt")
    lacking = dataclasses.replace(point, parameters=(*point.parameters, "attention_backend"))
    assert script.print_rows([lacking]) == ["gpt"]
    assert capsys.readouterr().out.endswith(" has no attention_backend\n")


def test_code_that_fails_at_import_is_named(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_at_import.py").write_text("raise RuntimeError('no such device')")
    monkeypatch.syspath_prepend(tmp_path)
    failing = dataclasses.replace(row("gpt"), module="fails_at_import")
    assert script.problems_of(failing) == ["(RuntimeError: no such device)"]


@pytest.mark.parametrize(
    ("version", "known"),
    [((0, 16, 1), (0, 18, 0)), ((0, 18, 2), (0, 18, 2)), ((1, 0, 0), (0, 20, 0))],
)
def test_nearest_version(script: ModuleType, version: tuple, known: tuple) -> None:
    assert script.nearest(MegatronVersion(*version)) == known


def test_last_words_say_what_to_edit(script: ModuleType) -> None:
    words = script.closing_words(MegatronVersion(0, 19, 2), ["batch", "gpt"])
    assert words.startswith("every hook point must fit, got other code at batch, gpt; change ")
    assert "does not know" not in words
    newer, older = (script.closing_words(MegatronVersion(0, n, 0), []) for n in (21, 16))
    assert "rows of 0.20; " in newer and "set LAST and SUPPORTED in" in newer
    assert "rows of 0.18; " in older and "set FIRST and SUPPORTED in" in older
    assert script.closing_words(MegatronVersion(0, 19, 2), []) == "every hook point fits"


def test_a_folder_without_megatron_is_one_line(tmp_path: Path) -> None:
    result = run("--megatron", tmp_path)
    assert result.returncode == 2
    assert f"error: --megatron must hold megatron/core, got {tmp_path};" in result.stderr


@pytest.mark.megatron_checkout
def test_every_point_of_the_checkout_fits(megatron_checkout: Path) -> None:
    result = run("--megatron", megatron_checkout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert set(rows_of_output(result.stdout).values()) == {"ok"}
