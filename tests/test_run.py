"""`python -m megatron_magi.run SCRIPT ...` runs the script as Python would, after the hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_magi import run

SCRIPT = """
import sys
import beside_it
from recorded import seen
seen.append((__name__, sys.argv, beside_it.VALUE))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "megatron" / "pretrain_gpt.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    (path.parent / "beside_it.py").write_text("VALUE = 5\n")
    monkeypatch.setattr(sys, "argv", ["run.py", "--of-the-caller"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return path


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What happened: the flags that the hooks saw, then what the script saw."""
    happened: list[object] = []
    install = lambda: happened.append([*sys.argv])  # noqa: E731
    launcher = SimpleNamespace(install=install)
    monkeypatch.setitem(sys.modules, "megatron_magi.launcher", launcher)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "recorded", SimpleNamespace(seen=happened))  # type: ignore[arg-type]
    yield happened
    sys.modules.pop("beside_it", None)


def test_the_script_is_main_behind_the_hooks(script: Path, seen: list[object]) -> None:
    run.main(["megatron/pretrain_gpt.py", "--lr", "1", "--attention-backend", "magi"])
    argv = [str(script), "--lr", "1", "--attention-backend", "magi"]
    assert seen == [argv, ("__main__", argv, 5)]


def test_without_arguments_of_its_own_it_takes_the_processs(
    script: Path, seen: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", str(script), "--bf16"])
    run.main()
    assert seen[0] == [str(script), "--bf16"]


@pytest.mark.parametrize(
    "given, got",
    [
        ([], "got none"),
        (["--lr", "1"], r"got \['--lr'\]"),
    ],
    ids=["nothing", "a flag"],
)
def test_without_a_script_first_the_usage_is_said(
    script: Path, seen: list[object], given: list[str], got: str
) -> None:
    with pytest.raises(SystemExit, match=f"(?s)^usage: .*error: a script is required first, {got}"):
        run.main(given)
    assert seen == []


@pytest.mark.parametrize("given", ["none.py", "megatron"], ids=["no file", "a folder"])
def test_a_script_that_does_not_exist_is_called_that(
    script: Path, seen: list[object], given: str
) -> None:
    with pytest.raises(SystemExit, match=f"(?s)^usage: .*must exist, got '{given}' in .*no such"):
        run.main([given, "--attention-backend", "magi"])
    assert seen == []


def test_the_packaged_script_gives_way_to_a_file_of_its_name(script: Path) -> None:
    example = Path(run.__file__).parents[1] / "examples" / "pretrain_gpt.py"
    assert run.find_script("pretrain_gpt") == example
    Path("pretrain_gpt").touch()
    assert run.find_script("pretrain_gpt") == Path("pretrain_gpt")


def test_help_lists_our_flags(capsys: pytest.CaptureFixture[str]) -> None:
    run.main(["--help"])
    said = capsys.readouterr().out
    assert said.startswith(run.USAGE) and "--magi-mask MODULE:FUNCTION" in said


def test_a_missing_package_is_one_line(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron_magi.launcher", None)
    with pytest.raises(SystemExit, match=r"^megatron_magi\.run: import of megatron_magi\.launch"):
        run.main([str(script)])
