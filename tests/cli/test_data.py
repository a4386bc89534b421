"""`megatron-magi data` as a user runs it: what it writes, its errors, and being stopped."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_magi.cli.data import limit_bytes
from megatron_magi.training.data.index_file import IndexFile
from megatron_magi.training.data.text_source import Document

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megatron_magi", "data"]
ENDLESS = """
import sys, time
from megatron_magi.cli import data, main
class Endless(data.TextSource):
    def __iter__(self):
        for number in range(10**9):
            yield data.Document(str(number), b"x" * (1 << 20))
            time.sleep(0.01)
data.TextSource = Endless
sys.exit(main(['data', *sys.argv[1:]]))
"""


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
    assert "2 documents, 10 tokens (byte tokenizer, vocabulary 257, EOD 256)" in run.stdout
    assert [len(IndexFile(f"{tmp_path}/c").get(i)) for i in range(2)] == [4, 6]
    assert run.stdout.endswith(f"data.path={tmp_path}/c data.eod_token=256 model.vocab_size=257\n")
    assert run.stderr == ""  # no bar where nobody looks

    whole = gzip.compress(b'{"body": "another"}\n' * 50_000)
    (tmp_path / "u.jsonl.gz").write_bytes(whole[:-20])
    before = contents(tmp_path)
    run = prepare(tmp_path, "u.jsonl.gz", "--json-key", "body")
    assert run.returncode == 2
    assert run.stderr.startswith("error: an input must be readable to its end, got u.jsonl.gz")
    assert len(run.stderr.splitlines()) == 1
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_one_line_or_one_object_for_other_programs(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text")
    keys = f"data.path={tmp_path}/c data.eod_token=256 model.vocab_size=257\n"
    quiet = prepare(tmp_path, "t.txt", "--quiet").stdout
    assert quiet.count("\n") == 1 and quiet.endswith(keys)
    facts = json.loads(prepare(tmp_path, "t.txt", "--json").stdout)
    assert (facts["path"], facts["num_tokens"], facts["eod_token"]) == (f"{tmp_path}/c", 5, 256)


@pytest.mark.slow
def test_the_script_of_a_checkout_is_the_command(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text")
    script = [sys.executable, str(ROOT / "scripts" / "prepare_data.py")]
    runs = [
        subprocess.run(
            [*start, "t.txt", "--output", "c"],
            capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment(),
        )
        for start in (COMMAND, script)
    ]  # fmt: skip
    assert runs[0].returncode == runs[1].returncode == 0, runs
    assert runs[0].stdout == runs[1].stdout and "1 documents, 5 tokens" in runs[0].stdout


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


@pytest.mark.slow
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_a_signal_leaves_the_old_corpus_and_no_litter(
    tmp_path: Path, number: signal.Signals, workers: int
) -> None:
    before = old_corpus(tmp_path)
    arguments = [str(ROOT), "--output", str(tmp_path / "c"), "--workers", str(workers)]
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, *arguments],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C reaches the whole group
    )
    wait_for_tokens(tmp_path, process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert said == ("interrupted, nothing was written\n" if number == signal.SIGINT else "")
    assert contents(tmp_path) == before


def old_corpus(folder: Path) -> dict[str, bytes]:
    for suffix in ("bin", "idx", "documents", "json"):
        (folder / f"c.{suffix}").write_text(f"old {suffix}")
    return contents(folder)


@pytest.mark.slow
def test_a_kill_leaves_the_old_corpus(tmp_path: Path) -> None:
    """Nothing can clean up after SIGKILL: what was begun stays under a name that says so."""
    before = old_corpus(tmp_path)
    arguments = [str(ROOT), "--output", str(tmp_path / "c"), "--workers", "1"]
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, *arguments], env=environment())
    wait_for_tokens(tmp_path, process)
    process.kill()
    process.wait(60)
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    left = set(after) - set(before)
    assert left and all(name.startswith(".c.") and name.endswith(".partial") for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_leaves_the_old_corpus_and_says_so(tmp_path: Path, workers: int) -> None:
    before = old_corpus(tmp_path)
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))\n"
    arguments = [str(ROOT), "--output", str(tmp_path / "c"), "--workers", str(workers)]
    run = subprocess.run(
        [sys.executable, "-c", limited + ENDLESS, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2
    (said,) = run.stderr.splitlines()
    assert said.startswith("error: writing c.bin needs room and a folder that it can write, got ")
    assert f"File too large in {tmp_path} (" in said
    assert contents(tmp_path) == before


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
    assert run.stderr.startswith("error: writing c.bin needs room and a folder that it can write")
    assert len(run.stderr.splitlines()) == 1


def wait_for_tokens(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not any(p.stat().st_size for p in folder.glob(".c.bin.*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)


def test_a_limit_ends_behind_the_document_that_reaches_it() -> None:
    documents = [Document(str(i), b"four") for i in range(5)]
    for limit, number in ((None, 5), (1, 1), (4, 1), (5, 2), (100, 5)):
        assert len(list(limit_bytes(documents, limit))) == number
