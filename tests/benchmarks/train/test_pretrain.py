"""Options of pretrain.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.train import pretrain
from megatron_magi.cli.parser import UsageError


@pytest.mark.parametrize(
    "more, text",
    [
        ((), "--megatron needs a checkout with pretrain_gpt.py"),
        (("--rounds", "0"), "--rounds: must be a whole number of 1 or more, got 0"),
        (("--limit-s", "nan"), "--limit-s: must be a number above 0, got nan"),
    ],
)
def test_wrong_options_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: tuple[str, ...], text: str
) -> None:
    words = ["agree", "--megatron", str(tmp_path), "--record", str(tmp_path / "x.json"), *more]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *words])
    with pytest.raises(UsageError, match=text):
        pretrain.parse()


def test_a_record_needs_its_folder_and_a_word_its_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    words = ["pretrain.py", "agree", "--megatron", str(tmp_path), "--only", "no such case"]
    monkeypatch.setattr(sys, "argv", [*words, "--record", str(tmp_path / "none" / "x.json")])
    with pytest.raises(UsageError, match="--record: must be a file in a folder that exists"):
        pretrain.parse()
    monkeypatch.setattr(sys, "argv", [*words, "--record", str(tmp_path / "x.json")])
    options = pretrain.parse()
    with pytest.raises(UsageError, match=r"--only must be part of a case's name, got .*stock cp1"):
        pretrain.chosen_cases(options)
    options.only = ["odd"]
    names = [case.name for case in pretrain.chosen_cases(options)]
    assert names == ["magi cp2 odd", "stock cp1 odd"]
