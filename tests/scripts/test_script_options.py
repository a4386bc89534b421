"""Options that scripts share, and the scripts that take them."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

import pytest

from megatron_magi.cli.parser import UsageError

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from script_options import at_least, head_counts, list_of, new_file, one_of


def test_at_least() -> None:
    assert at_least(2)("2") == 2 and at_least(16, 16)("32") == 32
    for text in ("1", "-3", "2.5", "two", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=f"number of 2 or more, got {text}$"):
            at_least(2)(text)
    for text in ("0", "20"):
        with pytest.raises(argparse.ArgumentTypeError, match="16 or more, a multiple of 16, got"):
            at_least(16, 16)(text)


def test_lists_and_words() -> None:
    assert list_of(at_least(1))("3,1") == [3, 1]
    assert list_of(one_of(("fwd", "bwd")))("bwd,fwd") == ["bwd", "fwd"]
    with pytest.raises(argparse.ArgumentTypeError, match=r"got 0$"):
        list_of(at_least(1))("3,0")
    with pytest.raises(argparse.ArgumentTypeError, match=r"of fwd, bwd, got forward$"):
        list_of(one_of(("fwd", "bwd")))("fwd,forward")


def test_head_counts() -> None:
    assert head_counts("64,8") == [64, 8]
    for text in ("64", "64,8,8", "64,7", "8,64"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"as 64,8, got {text}$"):
            head_counts(text)


def test_a_new_file_lies_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert new_file("a.json") == Path("a.json")
    for text in (str(tmp_path), str(tmp_path / "none" / "a.json")):
        with pytest.raises(argparse.ArgumentTypeError, match="a folder that exists, got"):
            new_file(text)


@pytest.mark.parametrize("exists", [False, True])
def test_a_new_file_may_be_written(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    if exists:
        path.touch()
    asked = []
    monkeypatch.setattr("os.access", lambda place, mode: asked.append((place, mode)))
    with pytest.raises(argparse.ArgumentTypeError, match="that may be written, got"):
        new_file(str(path))
    assert asked == [(path if exists else tmp_path, os.W_OK)]


NOTHING = [
    *(("bench_agreement", word) for word in ("--ranks 0", "--calls 20", "--every-us -1")),
    ("bench_deterministic", "--rounds 0"),
    *(("bench_dist_attn", f"{name} 0") for name in ("--ranks", "--tokens", "--rounds")),
    *(("bench_dist_attn", word) for word in ("--rounds -1", "--heads 4", "--head-dim 0")),
    ("bench_dist_host", "--calls 0"),
    *(("bench_kernel", f"{name} 0") for name in ("--seqlens", "--rounds", "--value-dim")),
    *(("bench_kernel", word) for word in ("--heads 4", "--directions sideways", "--masks none")),
    ("bench_kernel_host", "--bursts 0"),
    *(("bench_long", word) for word in ("--tokens 0", "--heads 4", "--head-dim 0")),
    *(("bench_max_logits", word) for word in ("--rounds 0", "--seqlen 0")),
    ("bench_planner", "--packs 0"),
    ("bench_power", "--rounds 0"),
    *(("bench_schedules", f"{name} 0") for name in ("--rounds", "--seqlens")),
    ("bench_schedules", "--directions forward"),
    ("bench_sink", "--rounds 0"),
    *(("bench_work_lists", f"{name} 0") for name in ("--rounds", "--tokens")),
    *(("simulate_scale", f"{name} 0") for name in ("--packs", "--cp", "--tokens")),
]
PLANNING = ("bench_planner", "bench_work_lists", "simulate_scale")
WRITING = {(name, "--record") for name, _ in NOTHING if name not in ("bench_dist_host", *PLANNING)}
WRITING |= {(name, "--out") for name in PLANNING}


def refusal(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a script says before it measures anything."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(UsageError) as caught:
        importlib.import_module(script).main()
    return str(caught.value)


@pytest.mark.parametrize("script, words", NOTHING, ids=[" ".join(x) for x in NOTHING])
def test_to_measure_nothing_is_refused(
    script: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    option, value = words.split()
    said = refusal(script, [option, value], monkeypatch)
    assert option in said and "must be" in said and f"got {value}" in said


@pytest.mark.parametrize("script, option", sorted(WRITING))
def test_a_record_that_could_not_be_written_is_refused_first(
    script: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refusal(script, [option, "/no/such/folder/record.json"], monkeypatch)
    assert option in said and "must be a file in a folder that exists" in said
