"""Files of an archive come in its order, and an archive that breaks off is no end."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import IO, cast

import pytest

from megatron_magi.training.data.text_source import TextSource, tar_members
from megatron_magi.training.recipe.recipe_error import RecipeError
from tests.training.archives import MANY, tar_of


class Pipe:
    """Bytes that can be read once, from the front."""

    def __init__(self, content: bytes) -> None:
        self.content = io.BytesIO(content)

    def read(self, size: int = -1) -> bytes:
        return self.content.read(size)


def members(content: bytes) -> list[tuple[str, bytes]]:
    stream = cast(IO[bytes], Pipe(content))
    return [(name, file.read()) for name, file in tar_members(stream)]


def test_files_come_in_the_archives_order_without_links() -> None:
    files = {"./z.py": b"first", "a/b.py": b"", "a.py": b"x" * 1000}
    expected = [("z.py", b"first"), ("a/b.py", b""), ("a.py", b"x" * 1000)]
    assert members(tar_of(files)) == expected
    assert members(tar_of({})) == []


def test_a_file_that_is_not_read_hides_no_later_one() -> None:
    names = [name for name, _ in tar_members(io.BytesIO(tar_of(MANY)))]
    assert names == list(MANY)


def test_folders_are_no_files() -> None:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    assert members(target.getvalue()) == []


def test_a_damaged_header_is_an_error_behind_the_files_before_it() -> None:
    content = bytearray(tar_of(MANY))
    content[3 * 1536 + 148] ^= 1  # in the checksum of the fourth header
    found = []
    with pytest.raises(tarfile.ReadError, match="no right header at byte 4608: bad checksum"):
        for name, _ in tar_members(io.BytesIO(bytes(content))):
            found.append(name)
    assert found == ["f0", "f1", "f2"]


def test_a_tar_must_have_its_end_mark_and_right_headers(tmp_path: Path) -> None:
    whole = tar_of(MANY)
    header_and_text = 512 + 1024
    (tmp_path / "cut.tar").write_bytes(whole[: 10 * header_and_text])
    (tmp_path / "damaged.tar").write_bytes(
        whole[: 10 * header_and_text] + b"?" * 512 + whole[10 * header_and_text + 512 :]
    )
    (tmp_path / "none.tar").write_bytes(b"")
    for name in ("cut.tar", "damaged.tar", "none.tar"):
        with pytest.raises(RecipeError, match="no right header at byte"):
            list(TextSource([tmp_path / name]))
