"""scripts/prepare_data.py as a user runs it: what it writes, its errors, and being stopped."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_magi.training.index_file import IndexFile

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare_data.py"
ENDLESS = """
import sys, time
sys.path.insert(0, sys.argv[1])
import prepare_data
class Endless(prepare_data.TextSource):
    def __iter__(self):
        for number in range(10**9):
            yield prepare_data.Document(str(number), b"x" * (1 << 20))
            time.sleep(0.01)
prepare_data.TextSource = Endless
sys.exit(prepare_data.main(sys.argv[2:]))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def prepare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--output", str(folder / "c")],
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


@pytest.mark.parametrize("value", ["0", "-5", "many"])
def test_numbers_are_checked(tmp_path: Path, value: str) -> None:
    (tmp_path / "t.txt").write_text("text")
    run = prepare(tmp_path, "t.txt", f"--max-bytes={value}")
    assert run.returncode == 2
    assert f"--max-bytes: must be a whole number of 1 or more, got {value}" in run.stderr
    assert set(contents(tmp_path)) == {"t.txt"}


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_a_signal_leaves_the_old_corpus_and_no_litter(
    tmp_path: Path, number: signal.Signals, workers: int
) -> None:
    for suffix in ("bin", "idx", "documents", "json"):
        (tmp_path / f"c.{suffix}").write_text(f"old {suffix}")
    before = contents(tmp_path)
    scripts = str(SCRIPT.parent)
    arguments = [str(ROOT), "--output", str(tmp_path / "c"), "--workers", str(workers)]
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, scripts, *arguments],
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


def wait_for_tokens(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not any(p.stat().st_size for p in folder.glob(".c.bin.*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
