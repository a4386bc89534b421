"""`megatron-magi doctor`: what it finds on a machine, and what it says to do."""

import json
from typing import Any

import pytest

from megatron_magi.cli import doctor
from megatron_magi.cli.check_result import Check
from tests.cli.command import Capture, run


def test_doctor_here(capsys: Capture) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    for name in ("python", "torch", "GPU", "driver", "nvcc", "CUDA library", "megatron-core",
                 "transformer-engine", "apex", "kernel     ", "transport  ",
                 "layers     "):  # fmt: skip
        assert name in out
    assert "forward and backward agree with torch's" in out and "ready" in out


def test_doctor_json_and_quiet(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, _ = run(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["ok"] and facts["kernel"]["name"] == "reference"
    assert "because torch has no GPU" in facts["kernel"]["why"]
    assert facts["transport"]["name"] == "gloo"
    assert facts["layers"]["name"] in ("local", "transformer_engine")
    assert {c["status"] for c in facts["checks"]} <= {"ok", "absent"}
    code, out, _ = run(capsys, "doctor", "--quiet")
    assert code == 0 and out.count("\n") == 1


def test_doctor_requires_what_is_not_there(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, _ = run(capsys, "doctor", "--require", "gpu", "cuda", "-q")
    assert code == 1 and "not ready: --require gpu: none; " in out
    assert "--require cuda: attention runs on reference; it needs a Hopper GPU" in out


def test_doctor_finds_broken_attention(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such op")

    monkeypatch.setattr(doctor, "_difference_to_torch", broken)
    code, out, _ = run(capsys, "doctor", "-q")
    assert code == 1 and "not ready: attention: RuntimeError: no such op" in out


def test_training_alone_needs_megatron() -> None:
    checks = [Check("megatron-core", "absent", "none"), Check("CUDA library", "absent", "")]
    ready = doctor.judge(checks, "reference", [])
    assert ready[0] and "training needs megatron-core" in ready[1]
    refused = doctor.judge(checks, "reference", ["megatron"])
    assert not refused[0] and "--require megatron" in refused[1]
