"""Options that programs share, and the programs that take them."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

import pytest

from benchmarks.lib.options import at_least, head_counts, list_of, new_file, one_of, positive
from megatron_magi.cli.parser import UsageError


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
    assert head_counts("64,8") == head_counts("64/8") == [64, 8]
    for text in ("64", "64/7", "64,8,8", "64,7", "8,64"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"as 64,8 or 64/8, got {text}$"):
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
    *(("benchmarks.distributed.attn", f"{name} 0") for name in ("--ranks", "--tokens", "--rounds")),
    *(
        ("benchmarks.distributed.attn", word)
        for word in ("--rounds -1", "--heads 4", "--head-dim 0")
    ),
    *(
        ("benchmarks.kernel.speed", f"{name} 0")
        for name in ("--seqlens", "--rounds", "--value-dim")
    ),
    *(
        ("benchmarks.kernel.speed", word)
        for word in ("--heads 4", "--directions sideways", "--masks none")
    ),
    ("benchmarks.kernel.host", "--bursts 0"),
    *(("benchmarks.kernel.options", f"{name} 0") for name in ("--rounds", "--seqlens")),
    ("benchmarks.planner.plans", "--packs 0"),
    *(("benchmarks.kernel.schedules", f"{name} 0") for name in ("--rounds", "--seqlens")),
    ("benchmarks.kernel.schedules", "--directions forward"),
    *(("benchmarks.planner.work_lists", f"{name} 0") for name in ("--rounds", "--tokens")),
    *(("tools.simulate_scale", f"{name} 0") for name in ("--packs", "--cp", "--tokens")),
]
PLANNING = ("benchmarks.planner.plans", "benchmarks.planner.work_lists", "tools.simulate_scale")
WRITING = {(name, "--record") for name, _ in NOTHING if name not in PLANNING}
WRITING |= {(name, "--out") for name in PLANNING}


def refusal(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a program says before it measures anything."""
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(UsageError) as caught:
        importlib.import_module(program).main()
    return str(caught.value)


@pytest.mark.parametrize("program, words", NOTHING, ids=[" ".join(x) for x in NOTHING])
def test_to_measure_nothing_is_refused(
    program: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    option, value = words.split()
    said = refusal(program, [option, value], monkeypatch)
    assert option in said and "must be" in said and f"got {value}" in said


NEEDED = [
    ("benchmarks.train.fsdp2", "", "ranks that torchrun has started are needed"),
    ("benchmarks.train.titan", "--torchtitan TREE", "ranks that torchrun has started are needed"),
]


@pytest.mark.parametrize("program, words, text", NEEDED, ids=[" ".join(x[:2]) for x in NEEDED])
def test_what_a_program_needs_is_said_before_it_starts_anything(
    program: str, words: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "trainer.py").touch()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("RANK", raising=False)
    said = refusal(program, words.replace("TREE", str(tmp_path)).split(), monkeypatch)
    assert text in said and "; " in said


TABLES = [
    ("benchmarks.planner.layouts", "--table"),
    ("tools.fit_schedule", ""),
]


@pytest.mark.parametrize("content", ["{}", "[1]", '{"rows": [5]}', '{"rows": [{"mask": "full"}]}'])
@pytest.mark.parametrize("program, option", TABLES, ids=[name for name, _ in TABLES])
def test_another_record_is_refused(
    program: str, option: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    said = refusal(program, [*option.split(), str(path)], monkeypatch)
    assert "a record of" in said and f"got {path} without" in said


@pytest.mark.parametrize("program, option", sorted(WRITING))
def test_a_record_that_could_not_be_written_is_refused_first(
    program: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refusal(program, [option, "/no/such/folder/record.json"], monkeypatch)
    assert option in said and "must be a file in a folder that exists" in said


def test_positive() -> None:
    assert positive("0.5") == 0.5
    for text in ("0", "-1", "nan", "inf", "one"):
        with pytest.raises(
            argparse.ArgumentTypeError, match=f"must be a number above 0, got {text}"
        ):
            positive(text)
