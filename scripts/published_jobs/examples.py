"""The training jobs of a checkout's example scripts: each script runs, with recording stubs."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from published_jobs.jobs import SCRIPTS, Found, Job

STUBS = (
    "torchrun", "python", "python3", "srun", "sbatch", "uv", "ft_launcher", "nsys", "pip", "pip3",
    "git", "wget", "curl", "docker", "ssh", "scontrol", "nvidia-smi", "huggingface-cli", "hf",
)  # fmt: skip
"""Commands that record their words and what they are fed, and do nothing."""

STUB = """#!/bin/sh
{ printf '%s\\0' "$@"; if [ "${0##*/}" = sbatch ]; then cat; fi; printf '\\n\\0'; } >> "$RECORD"
"""

TRIES = (
    tuple(f"argument{i}" for i in range(1, 6)),
    ("--checkpoint-path", "."),
    ("meta-llama/Llama-3.2-1B-Instruct",),
)
"""Words for a script's own arguments: any, those of GPT-OSS, and a model of the ModelOpt folder."""

VARIABLES = {"USER": "nobody", "MLM_MODEL_CKPT": "checkpoint", "BLEND_PATH": "blend"}
"""Shell variables that a user sets before."""

TIME_LIMIT_S = 20


def find_examples(megatron: Path) -> Found:
    """Jobs of `examples/**/*.sh` that call one of our scripts."""
    found = Found()
    with tempfile.TemporaryDirectory() as temporary:
        sandbox = _sandbox(megatron, Path(temporary))
        for path in sorted((sandbox / "examples").rglob("*.sh")):
            if not any(script in path.read_text() for script in SCRIPTS):
                continue
            name = path.relative_to(sandbox / "examples").as_posix()
            job = _job_of(name, path, sandbox)
            if job is None:
                found.left_out["example that starts nothing by itself"] += 1
            else:
                found.jobs.append(job)
    return found


def _sandbox(megatron: Path, temporary: Path) -> Path:
    """A folder with the examples, empty training scripts, and the stubs beside it."""
    sandbox, stubs = temporary / "tree", temporary / "stubs"
    shutil.copytree(megatron / "examples", sandbox / "examples", symlinks=True)
    stubs.mkdir()
    for script in SCRIPTS:
        (sandbox / script).touch()
    for name in STUBS:
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    return sandbox


def _job_of(name: str, path: Path, sandbox: Path) -> Job | None:
    """The first training command that the script gives, with the first arguments that it takes."""
    for arguments in TRIES:
        for words in _commands(path, arguments, sandbox):
            started = _training(words)
            if started:
                return Job(name, "example", *started)
    return None


def _commands(path: Path, arguments: tuple[str, ...], sandbox: Path) -> Iterator[list[str]]:
    """The words of every stub that the script called, within the time limit and off the network."""
    record = sandbox.parent / "record"
    record.write_bytes(b"")
    search = f"{sandbox.parent / 'stubs'}:{os.environ['PATH']}"
    home = VARIABLES | {"HOME": str(sandbox), "RECORD": str(record), "PATH": search}
    process = subprocess.Popen(
        [*_off_the_network(), "bash", str(path), *arguments], cwd=sandbox, env=home,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TIME_LIMIT_S)
    with contextlib.suppress(ProcessLookupError):  # what it started may outlive it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for command in record.read_text(errors="replace").split("\n\0"):
        yield command.split("\0")


def _off_the_network() -> list[str]:
    """A prefix that gives a command no network, where the machine allows it."""
    prefix = ["unshare", "--map-root-user", "--net"]
    allowed = (
        shutil.which("unshare")
        and not subprocess.run([*prefix, "true"], capture_output=True).returncode
    )
    return prefix if allowed else []


def _training(words: list[str]) -> tuple[str, tuple[str, ...]] | None:
    """(our script, the words after it); a word may hold a whole command for another shell."""
    for i, word in enumerate(words):
        script = Path(word).name
        if script in SCRIPTS and not re.search(r"\s", word):
            # Arrays are expanded unquoted, so that a shell splits "--split '99,1,0'" once more.
            rest = tuple(text.strip("'\"") for text in words[i + 1 :] if text)
            return (script, rest) if rest else None
        if any(script in word for script in SCRIPTS):
            return _training(_shell_words(word))
    return None


def _shell_words(text: str) -> list[str]:
    """The words of a text of commands up to where a pipe or a next command begins."""
    command = next(line for line in _lines(text) if any(script in line for script in SCRIPTS))
    command = re.sub(r"\d*>&\d", " ", command)
    if command.count('"') % 2:  # the quotation began or ends on another line
        command = command.replace('"', " ")
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    return list(itertools.takewhile(lambda word: not set(word) <= set("|;&<>"), lexer))


def _lines(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()
