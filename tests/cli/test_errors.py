"""Whatever stops a command is one line on standard error with exit code 2, never a traceback."""

from __future__ import annotations

import errno
import io
import os
import re
import runpy
import signal
import subprocess
import sys
from json import JSONDecodeError
from pathlib import Path

import pytest

from megatron_magi.cli import COMMANDS
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import UsageError
from megatron_magi.compare.run_error import RunError
from megatron_magi.requirements import MissingRequirement
from tests.cli.command import Capture, run

ROOT = Path(__file__).parents[2]
FILES = {
    "bytes": b"\xff\xfe\x00",
    "list.json": b"[1, 2]\n",
    "odd.json": b'{"q_ranges": 3, "k_ranges": [[0]], "total": 8}\n',
    "afile": b"text\n",
    "run/steps.csv": b"\xff\xfe\n",
    "cut/steps.csv": b"iteration,lm_loss\n1\n",
}
"""Written into the folder where the commands run; `folder` is one more, empty."""

CASES = [
    # options that are not there
    ("--verion", "did you mean --version?"),
    ("plan --laouts", "megatron-magi plan has no option --laouts; did you mean --layouts?"),
    ("doctor --require", "expected at least one argument"),
    ("check", "a pretrain script and its flags are required after --, got none"),
    # masks
    ("plan --lengths 8 --cp 2 --heads 32/8", "--heads must be three numbers Q,KV,DIM, or four"),
    ("plan --lengths 8 --cp 2 --heads 32/8", "got '32/8'; such as 32,8,128"),
    ("plan --lengths 8 --cp 2 --window a", "--window must be L or L,R, got 'a'; such as 1024"),
    ("plan --lengths 8 --cp 2 --window=-1,x", "got '-1,x'; such as 1024"),
    ("plan --cp 2 --cu-seqlens @none", "got No such file or directory: none; check the path"),
    ("plan --cp 2 --cu-seqlens @folder", "got Is a directory: folder; check the path"),
    ("plan --cp 2 --cu-seqlens @bytes", "must be UTF-8, got byte 0xff at 0 in bytes"),
    ("plan --cp 2 --ranges none", "got No such file or directory: none"),
    ("plan --cp 2 --ranges bytes", "must be UTF-8, got byte 0xff at 0 in bytes"),
    ("plan --cp 2 --ranges list.json", "must be a JSON object with q_ranges, k_ranges, total"),
    ("plan --cp 2 --ranges odd.json", "q_ranges must have shape [num_slices, 2]"),
    ("plan --cp 2 --data none --seq-length 8", "must be the prefix of a .bin and an .idx file"),
    ("plan --cp 2 --lengths 1x99999999", "numbers must be at most 1,048,576"),
    ("plan --cp 2 --lengths 1x" + "9" * 30, "numbers must look like 4096,8192x3"),
    ("plan --cp 2 --lengths 1000000000000000", "none above 1,073,741,824, got 1000000000000000"),
    ("plan --cp 2 --lengths 8 --total 1000000000000000", "total_seqlen_q must be between 0 and"),
    ("plan --cp 2 --lengths 8 --total 1e15", "argument --total: invalid int value: '1e15'"),
    ("plan --cp 1000000 --lengths 100", "cp_size must be between 1 and 8192, got 1000000"),
    ("plan --cp 4096 --lengths 16777216", "use a chunk_size of at least 1,024 for these"),
    ("plan --cp 4 --lengths 65536 --chunk-size 1", "4 ranks may have at most 8,192 chunks each"),
    ("plan --cp 2 --lengths 8 --token-multiple 1000000000000", "at most 1,073,741,824 tokens"),
    ("plan --cp 2 --lengths 0", "a plan needs at least one token, got an empty sequence"),
    ("plan --cp 2 --cu-seqlens 0,0", "a plan needs at least one token, got an empty sequence"),
    ("viz --cp 2 --lengths 0", "a picture needs at least one token, got an empty sequence"),
    # text to pack
    ("data", "the following arguments are required: INPUT, --output"),
    ("data none --output o", "must be a file, pipe or folder, got none, which is none"),
    ("data afile --output o.bin", "the prefix of its files, got o.bin; leave .bin out"),
    ("data afile --output o --split (", "split must be a regular expression, got '('"),
    ("data afile --output o --tokenizer none", "a folder with a tokenizer.json, got 'none'"),
    ("data afile --outptu o", "megatron-magi data has no option --outptu; did you mean --output?"),
    # places to write, runs
    ("viz --cp 2 --lengths 64 --format svg --out afile/x", "got Not a directory: afile/x"),
    ("viz --cp 2 --lengths 64 --format svg --out afile", "got File exists: afile"),
    ("compare run cut", "must be text with a line for each iteration"),
    ("compare cut run", "a steps.csv must have the columns and numbers"),
    ("compare folder folder", "must have a steps.csv or TensorBoard events, got none in folder"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line, text", CASES, ids=[line[:60] for line, _ in CASES])
def test_one_line_and_exit_code_2(capsys: Capture, folder: Path, line: str, text: str) -> None:
    if "viz" in line:
        pytest.importorskip("matplotlib")
    code, _, err = run(capsys, *line.split(" "))
    assert (code, err.count("\n")) == (2, 1) and err.startswith("error: "), err
    assert text in err


def test_every_command_has_a_case() -> None:
    assert {line.split()[0] for line, _ in CASES} >= set(COMMANDS)


@pytest.mark.parametrize("error, code, text", [
    (UsageError("two\nlines"), 2, "error: two lines\n"),
    (RunError("a run"), 2, "error: a run\n"),
    (MissingRequirement("no planner"), 2, "error: no planner\n"),
    (ModuleNotFoundError("No module", name="safetensors"), 2, "error: this needs safetensors, got"),
    (OSError(errno.ENOSPC, "No space left on device", "x"), 2, "got No space left on device: x;"),
    (PermissionError(errno.EACCES, "Permission denied", "y"), 2, "got Permission denied: y; check"),
    (UnicodeDecodeError("utf-8", b"a\xff", 1, 2, "bad"), 2, "must be UTF-8, got byte 0xff at 1"),
    (JSONDecodeError("Expecting value", "", 0), 2, "error: a file of JSON must be whole, got Exp"),
    (MemoryError(), 2, "error: more memory is needed than there is"),
    (KeyboardInterrupt(), 130, "error: interrupted\n"),
    (BrokenPipeError(), 141, ""),
], ids=lambda e: type(e).__name__ if isinstance(e, BaseException) else None)  # fmt: skip
def test_what_a_program_may_end_with(
    capsys: Capture, error: BaseException, code: int, text: str
) -> None:
    def program() -> int:
        raise error

    assert run_cli(program) == code
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == bool(text)


def test_our_own_mistakes_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_cli(lambda: 1 // 0)


@pytest.mark.parametrize(
    ("rest", "code", "said"),
    [("--json | true", 141, ""), ("-q > /dev/full", 2, "No space left on device")],
)
def test_closed_pipes_and_full_disks(rest: str, code: int, said: str) -> None:
    line = f"{sys.executable} -m megatron_magi plan --lengths 64 --cp 2"
    script = ["bash", "-c", f"set -o pipefail; {line} {rest}"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == bool(said) and said in done.stderr


def test_an_output_that_lacks_letters_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert run_cli(lambda: print("h\u00e9 \udcff")) == 0
    assert written.getvalue() == b"h\\xe9 \\udcff\n"


@pytest.mark.slow
def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    fifo = tmp_path / "lengths"  # the command waits for what nobody writes
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "megatron_magi", "plan", "--cu-seqlens", f"@{fifo}"]
    started = subprocess.Popen([*command, "--cp", "2"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    with open(fifo, "w"):  # returns once the command reads
        started.send_signal(signal.SIGINT)
        _, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (130, "error: interrupted\n")


PROGRAMS = [
    *(ROOT / "scripts").glob("*.py"),
    *(ROOT / "benchmarks").glob("*/*.py"),
    *(ROOT / "tools").glob("*.py"),
]
OTHERWISE = {
    "benchmarks/train/lost_gradients": "stands in for megatron_magi.run",
    "benchmarks/train/pretrain_named": "stands in for megatron_magi.run",
    "benchmarks/train/pretrain_sft": "does too",
    "benchmarks/train/early_start": "is started by llama",
    "benchmarks/train/warm_rank": "is started by warm_ranks",
    "scripts/check_jobs": "is like check_hooks",
    "scripts/check_hooks": "runs where the package is not installed",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def test_there_are_programs() -> None:
    assert len(PROGRAMS) > 70 and OTHERWISE.keys() <= set(map(name_of, PROGRAMS))


@pytest.mark.parametrize("path", sorted(PROGRAMS), ids=name_of)
def test_programs_end_the_same_way(path: Path) -> None:
    text = path.read_text()
    if '"__main__":' not in text or name_of(path) in OTHERWISE:
        return
    assert text.endswith('if __name__ == "__main__":\n    raise SystemExit(run_cli(main))\n')
    assert not re.search(r"argparse\.ArgumentParser\(", text), "CommandParser suggests"


@pytest.mark.parametrize("words, text", [
    (["--tabel", "x"], "error: layouts.py has no option --tabel; did you mean --table?"),
    (["--table", "none"], "got No such file or directory: none; check the path"),
])  # fmt: skip
def test_a_program_says_it_in_one_line(
    words: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "argv", ["layouts.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / "planner" / "layouts.py"), run_name="__main__")
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n")) == (2, 1) and text in err, err
