"""`megatron-magi data`: what it writes, and its errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Thread

import pytest

from megatron_magi.cli.data import limit_bytes
from megatron_magi.launcher.file_samples import open_index
from megatron_magi.text.documents import Document
from tests.cli.command import Capture, run

ROOT = Path(__file__).parents[2]
FLAGS = "--tokenizer-type NullTokenizer --vocab-size 257"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def prepare(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.chdir(folder)
    return run(capsys, "data", *arguments, "--output", str(folder / "c"))


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_it_packs_keeps_what_was_there_when_it_fails_and_says_why(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "t.jsonl").write_text('{"body": "one"}\n{"body": "three"}\n')
    code, out, err = prepare(capsys, monkeypatch, tmp_path, "t.jsonl", "--json-key", "body")
    assert (code, err) == (0, "")
    said = "2 documents, 10 tokens, longest 6 (byte tokenizer, vocabulary 257, EOD 256)"
    assert said in out
    assert list(open_index(f"{tmp_path}/c").sequence_lengths) == [4, 6]
    assert out.endswith(f"--data-path {tmp_path}/c {FLAGS}\n")

    (tmp_path / "u.jsonl").write_text('{"body": "another"}\n{"body": 5}\n')
    before = contents(tmp_path)
    code, _, err = prepare(capsys, monkeypatch, tmp_path, "u.jsonl", "--json-key", "body")
    assert code == 2
    assert err.startswith("error: a line of a .jsonl file must be an object with a text in")
    assert len(err.splitlines()) == 1
    assert contents(tmp_path) == before


def test_one_line_or_one_object_for_other_programs(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text("text")
    keys = f"--data-path {tmp_path}/c {FLAGS}\n"
    _, quiet, _ = prepare(capsys, monkeypatch, tmp_path, "t.txt", "--quiet")
    assert quiet.count("\n") == 1 and quiet.endswith(keys)
    facts = json.loads(prepare(capsys, monkeypatch, tmp_path, "t.txt", "--json")[1])
    assert (facts["path"], facts["num_tokens"], facts["eod_token"]) == (f"{tmp_path}/c", 5, 256)


@pytest.mark.parametrize("value", ["0", "-5", "many"])
def test_numbers_are_checked(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    (tmp_path / "t.txt").write_text("text")
    code, _, err = prepare(capsys, monkeypatch, tmp_path, "t.txt", f"--max-bytes={value}")
    assert code == 2
    assert f"--max-bytes: must be a whole number of 1 or more, got {value}" in err
    assert set(contents(tmp_path)) == {"t.txt"}


def test_an_output_in_a_file_is_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "data", "t.txt", "--output", "t.txt/c")
    assert code == 2
    assert err.startswith("error: files and folders must be there and open to")
    assert len(err.splitlines()) == 1


def test_a_folder_in_the_place_of_a_file_changes_nothing(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text("text")
    (tmp_path / "c.idx").mkdir()
    code, _, err = prepare(capsys, monkeypatch, tmp_path, "t.txt")
    assert code == 2 and f"Is a directory: {tmp_path}/c.idx; check" in err
    assert {path.name for path in tmp_path.iterdir()} == {"t.txt", "c.idx"}


def test_a_pipe_is_one_document(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = Thread(target=(tmp_path / "pipe").write_text, args=("text",), daemon=True)
    writer.start()
    code, out, err = prepare(capsys, monkeypatch, tmp_path, "pipe")
    assert (code, err) == (0, "") and out.startswith("1 documents, 5 tokens")
    writer.join(10)


def test_a_limit_ends_behind_the_document_that_reaches_it() -> None:
    documents = [Document(str(i), b"four") for i in range(5)]
    for limit, number in ((None, 5), (1, 1), (4, 1), (5, 2), (100, 5)):
        assert len(list(limit_bytes(documents, limit))) == number
