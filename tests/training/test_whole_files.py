"""Files appear together and complete or not at all, and folders by a renaming."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest

from megatron_magi.training.process.whole_files import (
    cannot_write,
    filled_folder,
    remove_folder,
    replace_folder,
    written_whole,
)
from megatron_magi.training.recipe.recipe_error import RecipeError
from tests.training.small_corpus import contents


def test_files_appear_together_when_all_are_written(tmp_path: Path) -> None:
    targets = [tmp_path / "new" / "a", tmp_path / "b"]
    targets[1].write_text("old")
    with written_whole(targets) as partial:
        for path in partial:
            path.write_text("new")
        assert not targets[0].exists() and targets[1].read_text() == "old"
    assert [target.read_text() for target in targets] == ["new", "new"]
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "new"]


def test_a_block_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    targets = [tmp_path / "a", tmp_path / "b"]
    targets[0].write_text("old")
    with pytest.raises(ZeroDivisionError), written_whole(targets) as partial:
        partial[0].write_text("new")
        raise ZeroDivisionError
    assert contents(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_no_room_for_a_file_is_one_line(tmp_path: Path, number: int) -> None:
    with pytest.raises(RecipeError) as error, written_whole([tmp_path / "a"]):
        raise OSError(number, "no\nroom")
    said = str(error.value)
    assert said.startswith(
        f"writing a needs room and a folder that it can write, got [Errno {number}"
    )
    assert "GiB free)" in said and len(said.splitlines()) == 1
    assert contents(tmp_path) == {}


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with (
        pytest.raises(RecipeError, match="must not be a folder, got"),
        written_whole([tmp_path / "b", tmp_path / "a"]),
    ):
        raise AssertionError("the work began")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_room_of_a_folder_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    error = cannot_write("a log", tmp_path / "nowhere", OSError(), "make room")
    assert str(error) == (
        f"a log needs room and a folder that it can write, got OSError in {tmp_path}/nowhere; "
        f"make room"
    )


def test_a_signal_waits_until_all_files_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = [tmp_path / "a", tmp_path / "b"]
    rename = Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        if target.name == "a":
            signal.raise_signal(signal.SIGINT)
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), written_whole(targets) as partial:
        for path in partial:
            path.write_text("new")
    assert contents(tmp_path) == {"a": b"new", "b": b"new"}


def test_other_errors_of_the_block_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), written_whole([tmp_path / "a"]):
        raise FileNotFoundError(errno.ENOENT, "an input")
    with pytest.raises(KeyboardInterrupt), filled_folder(tmp_path / "b") as partial:
        (partial / "file").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    final = tmp_path / "folder"
    for text in ("first", "second"):
        with filled_folder(final) as partial:
            (partial / text).write_text(text)
        assert not (final / text).exists()
        replace_folder(partial, final)
        assert contents(final) == {text: text.encode()}
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_folder_to_fill_is_empty_whatever_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / "folder.partial").mkdir()
    (tmp_path / "folder.partial" / "half").touch()
    with filled_folder(tmp_path / "folder") as partial:
        assert partial.is_dir() and not list(partial.iterdir())


def test_a_folder_that_is_partly_removed_has_lost_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_magi.training.process.whole_files.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_folder(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder.removed.partial"]
