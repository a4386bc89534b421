"""Ranks that share a GPU: what is changed for them, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.train import pretrain, pretrain_one_gpu
from megatron_magi.cli.parser import UsageError
from megatron_magi.core.comm import transport_choice


def test_every_rank_takes_the_first_gpu_and_gloo_gets_no_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **more: given.update(more))
    monkeypatch.setattr(dist, "_coalescing_manager", None)
    monkeypatch.setattr(transport_choice, "_why_not", None)
    for name in ("LOCAL_RANK", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"):
        monkeypatch.setenv(name, "1")
    pretrain_one_gpu.share_a_gpu()
    dist.init_process_group(backend="gloo", device_id="cuda:1")  # type: ignore[arg-type]
    assert given == {"backend": "gloo"}
    assert pretrain_one_gpu.os.environ["LOCAL_RANK"] == "0"
    with dist._coalescing_manager(None) as ended:
        pass
    ended.wait()
    assert transport_choice._why_not(None, None) == ""  # type: ignore[arg-type]


def test_times_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["pretrain.py", "graph_speed", "--one-gpu", "--megatron", "x", "--record", "y"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(UsageError, match="times of ranks that share a GPU"):
        pretrain.parse()


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
    with pytest.raises(UsageError, match="--record needs a folder that exists"):
        pretrain.parse()
    monkeypatch.setattr(sys, "argv", [*words, "--record", str(tmp_path / "x.json")])
    options = pretrain.parse()
    with pytest.raises(UsageError, match=r"--only must be part of a case's name, got .*stock cp1"):
        pretrain.chosen_cases(options)
    options.only = ["odd"]
    names = [case.name for case in pretrain.chosen_cases(options)]
    assert names == ["magi cp2 odd", "stock cp1 odd"]
