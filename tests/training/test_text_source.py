"""Inputs: what is taken, under which name and in which order; no file ends early in silence."""

from __future__ import annotations

import gzip
import lzma
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.training.data.text_source import (
    Document,
    Selection,
    TextSource,
    _split,
    _starts,
)
from megatron_magi.training.recipe.recipe_error import RecipeError
from tests.training.archives import MANY, tar_of

FILES = {
    "b.py": b"x = 1\ndef f():\n  pass\nclass C:\n  pass\n",
    "sub/a.py": b"y = 2\n",
    "sub/notes.txt": b"z\n",
    "skip/c.py": b"z = 3\n",
    "binary.py": b"\x00\x01",
    "empty.py": b" \n",
    "lines.jsonl": b'{"text": "eins", "body": "one"}\n\n{"text": "zwei", "body": "two"}\n',
}
PYTHON = Selection(include=("*.py",), exclude=("skip",))
PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(text)
    return tmp_path / "in"


def names(source: TextSource) -> list[str]:
    return [document.name for document in source]


def test_folders_are_read_in_sorted_order(folder: Path) -> None:
    (folder / "link.py").symlink_to("nowhere.py")
    source = TextSource([folder], PYTHON)
    assert names(source) == ["b.py", "sub/a.py"]
    assert names(source) == ["b.py", "sub/a.py"]
    assert source.num_binary == 1
    whole = TextSource([folder / "sub" / "notes.txt", folder])
    assert names(whole)[:2] == ["notes.txt", "b.py"]
    assert names(whole)[2:4] == ["lines.jsonl:1", "lines.jsonl:3"]


def test_links_to_files_are_taken_unless_refused(folder: Path) -> None:
    (folder / "sub" / "link.py").symlink_to("a.py")
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    assert names(TextSource([folder], PYTHON)) == ["b.py", "sub/a.py", "sub/link.py"]
    assert names(TextSource([folder], replace(PYTHON, links=False))) == ["b.py", "sub/a.py"]


def test_a_line_may_begin_a_document(folder: Path) -> None:
    cut = list(TextSource([folder / "b.py"], Selection(split="(def|class) ")))
    assert [d.name for d in cut] == ["b.py#1", "b.py#2", "b.py#3"]
    assert b"".join(d.text for d in cut) == FILES["b.py"]
    with pytest.raises(RecipeError, match="must be a regular expression, got '\\('"):
        list(TextSource([folder / "b.py"], Selection(split="(")))


@given(st.lists(st.sampled_from([b"def f\n", b"x\n", b" def\n", b"class", b"\n"]), min_size=1))
def test_pieces_are_the_text_and_begin_where_the_pattern_stands(lines: list[bytes]) -> None:
    text = b"".join(lines)
    pieces = list(_split(Document("d", text), _starts("def |class")))
    left = text
    for piece in pieces:
        skipped, found, left = left.partition(piece.text)
        assert found and not skipped.strip()
    assert not left.strip()
    assert all(piece.text.startswith((b"def ", b"class")) for piece in pieces[1:])
    assert all(b"\ndef " not in piece.text and b"\nclass" not in piece.text for piece in pieces)


@pytest.mark.parametrize("suffix", PACKERS)
def test_lines_of_json_are_documents(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.jsonl{suffix}"
    path.write_bytes(PACKERS[suffix](FILES["lines.jsonl"]))
    read = [(d.name, d.text) for d in TextSource([path])]
    assert read == [(f"t.jsonl{suffix}:1", b"eins"), (f"t.jsonl{suffix}:3", b"zwei")]
    other = TextSource([tmp_path], Selection(json_key="body"))
    assert [d.text for d in other] == [b"one", b"two"]


def test_text_is_what_the_json_says(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "\\u00e9\\ud800"}\r\n{"text": "\xc3\xa9"}'
    )
    assert [d.text for d in TextSource([tmp_path / "t.jsonl"])] == ["é?".encode(), "é".encode()]


@pytest.mark.parametrize(
    "line", ['{"txt": 1}', '{"text": null}', '["text"]', "3", "{", '{"text": "\udce9"}']
)
def test_a_line_without_text_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a"}\n' + line.encode(errors="surrogateescape"))
    with pytest.raises(RecipeError, match=r'a text in "text", got .* in bad.jsonl line 2'):
        list(TextSource([tmp_path / "bad.jsonl"]))


@pytest.mark.parametrize("name", ["t.tar", "t.tar.gz", "t.tgz", "t.tar.xz", "t.txz"])
def test_an_archive_is_read_like_its_folder(tmp_path: Path, folder: Path, name: str) -> None:
    pack = PACKERS[{"tgz": ".gz", "txz": ".xz", "tar": ""}.get(name[2:], name[5:])]
    files = {f"./{n}": FILES[n] for n in sorted(FILES)}
    (tmp_path / name).write_bytes(pack(tar_of(files)))
    for selection in (PYTHON, Selection(), Selection(exclude=("s*", "*.jsonl"))):
        ours = list(TextSource([tmp_path / name], selection))
        assert ours == list(TextSource([folder], selection))
    source = TextSource([tmp_path / name], PYTHON)
    assert names(source) == ["b.py", "sub/a.py"]
    assert source.num_binary == 1


def test_an_archive_in_a_folder_is_a_binary_file(folder: Path) -> None:
    (folder / "t.tar").write_bytes(tar_of({"inside.py": b"a"}))
    (folder / "t.tar.xz").write_bytes(lzma.compress(tar_of({"inside.py": b"a"})))
    source = TextSource([folder], Selection(include=("*.tar", "*.xz", "notes.txt")))
    assert names(source) == ["sub/notes.txt"]
    assert source.num_binary == 2


LINES = b"".join(b'{"text": "%s"}\n' % text for text in MANY.values())


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("name", ["t.tar", "t.tar.gz", "t.tar.xz", "t.jsonl.gz", "t.jsonl.xz"])
def test_a_truncated_file_is_no_end(tmp_path: Path, name: str, share: float) -> None:
    content = tar_of(MANY).rstrip(b"\0") if ".tar" in name else LINES
    content = PACKERS["" if name.endswith("tar") else name[-3:]](content)
    (tmp_path / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(RecipeError, match=rf"readable to its end, got .*{name}, .* truncated"):
        list(TextSource([tmp_path / name]))


def test_a_file_that_is_not_what_its_name_says(tmp_path: Path) -> None:
    for name in ("t.jsonl.gz", "t.jsonl.xz", "t.tar.gz", "t.txz", "t.tar"):
        (tmp_path / name).write_bytes(b"plain text" * 100)
        with pytest.raises(RecipeError, match="damaged or truncated"):
            list(TextSource([tmp_path / name]))


def test_a_missing_input_is_refused_before_reading(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist"):
        TextSource([tmp_path, tmp_path / "nowhere"])


def test_progress_counts_the_bytes_of_the_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl.xz").write_bytes(lzma.compress(LINES))
    source = TextSource([folder, tmp_path / "t.jsonl.xz"])
    seen = [source.bytes_read for _ in source]
    assert seen == sorted(seen)
    assert 0 < seen[0] < source.num_bytes
    assert source.bytes_read == source.num_bytes
    assert source.num_bytes == sum(map(len, FILES.values())) + len(lzma.compress(LINES))
