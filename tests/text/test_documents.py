"""Documents of files, folders and JSON lines, in a stable order."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path
from typing import Any

import pytest

from megatron_magi.text.documents import Document, Selection, read_documents


def texts(root: Path, **selection: object) -> list[tuple[str, str]]:
    found = read_documents([root], Selection(**selection))  # type: ignore[arg-type]
    return [(document.name, document.text.decode()) for document in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.md", "deep/c.txt", "deep/more/d.txt", ".git/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "binary.txt").write_bytes(b"text\0")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "deep" / "up").symlink_to(tmp_path)  # a circle
    (tmp_path / "link.txt").symlink_to("b.txt")
    return tmp_path


def test_a_folder_is_walked_in_order(folder: Path) -> None:
    names = [name for name, _ in texts(folder, include=["*.txt"], exclude=[".git"])]
    assert names == ["b.txt", "deep/c.txt", "deep/more/d.txt", "link.txt"]
    assert texts(folder / "a.md", include=["*.txt"]) == [("a.md", "a.md")]  # named, so taken
    with pytest.raises(ValueError, match=r"got .*nowhere, which is none; check the path"):
        texts(folder / "nowhere")


def test_lines_of_json_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"body": "one"}\n\n{"body": "\\u00e9"}\n')
    assert texts(path, json_key="body") == [("t.jsonl:1", "one"), ("t.jsonl:3", "\u00e9")]
    for line in ("[]", "5", "{", "[" * 100_000, '{"text": 5}', '{"other": "text"}'):
        path.write_text(f'{{"text": "fine"}}\n{line}\n')
        with pytest.raises(ValueError, match=r"text in \"text\", got .* in .*t\.jsonl line 2;"):
            texts(path)


def test_a_line_can_begin_a_document(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import a\ndef f():\n  def inner(): pass\nclass B: ...\n")
    found = texts(tmp_path, split="def |class ")
    assert [name for name, _ in found] == ["t.py#1", "t.py#2", "t.py#3"]
    assert found[1][1] == "def f():\n  def inner(): pass\n"
    with pytest.raises(ValueError, match=r"--split must be a regular expression, got '\('"):
        texts(tmp_path, split="(")


def test_letters_of_several_bytes_begin_documents(tmp_path: Path) -> None:
    text = "\u0410\u0430\n\u0431\n\u00e9\n\u0411\n"  # two lines begin with Cyrillic capitals
    (tmp_path / "t.txt").write_bytes(text.encode() + b"\xff")
    found = read_documents([tmp_path], Selection(split="[\u0410-\u042f]"))
    parts = [document.text for document in found]
    assert parts == [text[:7].encode(), text[7:].encode() + b"\xff"]


def test_no_text_is_lost_or_changed(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"\xff\r\nabc")
    assert list(read_documents([tmp_path], Selection())) == [Document("t.txt", b"\xff\r\nabc")]


@pytest.mark.parametrize(
    ("end", "opened"), [(".gz", gzip.open), (".GZ", gzip.open), (".xz", lzma.open)]
)
def test_packed_lines_of_json(tmp_path: Path, end: str, opened: Any) -> None:
    path = tmp_path / f"t.jsonl{end}"
    with opened(path, "wb") as file:
        file.write(b'{"text": "one"}\n' * 1000)
    assert len(texts(path)) == 1000 and texts(path)[1] == (f"t.jsonl{end}:2", "one")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a packed file must be whole, got .*t\.jsonl"):
        texts(path)


def test_a_named_binary_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(b"\x28\xb5\0")
    assert texts(tmp_path) == []
    with pytest.raises(ValueError, match=r"got .*t\.jsonl\.zst, which has a NUL byte; unpack it"):
        texts(path)
