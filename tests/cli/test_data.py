"""`megatron-magi data` as a user runs it: what it writes, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_magi.cli.data import limit_bytes
from megatron_magi.text.documents import Document
from megatron_magi.training.data.index_file import IndexFile

ROOT = Path(__file__).parents[2]
FLAGS = "--tokenizer-type NullTokenizer --vocab-size 257"
COMMAND = [sys.executable, "-m", "megatron_magi", "data"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def prepare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments, "--output", str(folder / "c")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=environment(),
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_it_packs_keeps_what_was_there_when_it_fails_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"body": "one"}\n{"body": "three"}\n')
    run = prepare(tmp_path, "t.jsonl", "--json-key", "body")
    assert run.returncode == 0, run.stderr
    said = "2 documents, 10 tokens, longest 6 (byte tokenizer, vocabulary 257, EOD 256)"
    assert said in run.stdout
    assert [len(IndexFile(f"{tmp_path}/c").get(i)) for i in range(2)] == [4, 6]
    assert run.stdout.endswith(f"--data-path {tmp_path}/c {FLAGS}\n")
    assert run.stderr == ""

    (tmp_path / "u.jsonl").write_text('{"body": "another"}\n{"body": 5}\n')
    before = contents(tmp_path)
    run = prepare(tmp_path, "u.jsonl", "--json-key", "body")
    assert run.returncode == 2
    assert run.stderr.startswith("error: a line of a .jsonl file must be an object with a text in")
    assert len(run.stderr.splitlines()) == 1
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_one_line_or_one_object_for_other_programs(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text")
    keys = f"--data-path {tmp_path}/c {FLAGS}\n"
    quiet = prepare(tmp_path, "t.txt", "--quiet").stdout
    assert quiet.count("\n") == 1 and quiet.endswith(keys)
    facts = json.loads(prepare(tmp_path, "t.txt", "--json").stdout)
    assert (facts["path"], facts["num_tokens"], facts["eod_token"]) == (f"{tmp_path}/c", 5, 256)


@pytest.mark.slow
def test_two_commands_train_the_tiny_recipe_in_any_folder(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("omegaconf")
    commands = (
        ["data", os.path.dirname(os.__file__), "--output", "runs/data/python_stdlib",
         "--include", "*.py", "--max-bytes", "100000"],
        ["train", "tiny_llama_cpu", "train.iterations=2", "optimizer.warmup_iters=0"],
    )  # fmt: skip
    for arguments in commands:
        run = subprocess.run(
            [*COMMAND[:3], *arguments],
            capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment(),
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-2000:]
    (steps,) = tmp_path.glob("runs/*/steps.csv")
    assert len(steps.read_text().splitlines()) == 3


@pytest.mark.parametrize("value", ["0", "-5", "many"])
def test_numbers_are_checked(tmp_path: Path, value: str) -> None:
    (tmp_path / "t.txt").write_text("text")
    run = prepare(tmp_path, "t.txt", f"--max-bytes={value}")
    assert run.returncode == 2
    assert f"--max-bytes: must be a whole number of 1 or more, got {value}" in run.stderr
    assert set(contents(tmp_path)) == {"t.txt"}


def test_an_output_in_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text")
    run = subprocess.run(
        [*COMMAND, "t.txt", "--output", "t.txt/c"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment(),
    )
    assert run.returncode == 2
    assert run.stderr.startswith("error: files and folders must be there and open to")
    assert len(run.stderr.splitlines()) == 1


def test_a_limit_ends_behind_the_document_that_reaches_it() -> None:
    documents = [Document(str(i), b"four") for i in range(5)]
    for limit, number in ((None, 5), (1, 1), (4, 1), (5, 2), (100, 5)):
        assert len(list(limit_bytes(documents, limit))) == number
