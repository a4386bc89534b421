"""What Megatron's layers run on: found, named, and what to do about it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_magi.cli import engine_checks
from megatron_magi.cli.check_result import Check


def found_packages(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> list[Check]:
    """The doctor's checks of TransformerEngine and apex with packages of these paths alone."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name.split("/")[0] / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(folder)])
    for name in ("apex", "transformer_engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return [engine_checks.check_engine(), engine_checks.check_apex()]


def test_neither_transformer_engine_nor_apex(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, apex = found_packages(monkeypatch, tmp_path)
    assert engine.status == apex.status == "absent"
    assert "github.com/NVIDIA/apex" in apex.advice and "pip install" not in apex.advice


def test_transformer_engine_and_nvidias_apex(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = found_packages(
        monkeypatch, tmp_path, "transformer_engine/pytorch", "apex/multi_tensor_apply"
    )
    assert [(c.status, c.found) for c in checks] == [("ok", "importable")] * 2


def test_the_other_apex_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, apex = found_packages(monkeypatch, tmp_path, "apex/sessions")
    assert apex.status == "absent" and "not NVIDIA's" in apex.found and "uninstall" in apex.advice


def test_apex_says_whether_it_fuses_gradients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, apex = found_packages(monkeypatch, tmp_path, "apex/multi_tensor_apply")
    assert apex.status == "ok" and "--no-gradient-accumulation-fusion" in apex.advice
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").touch()
    whole = engine_checks.check_apex()
    assert whole.found.endswith("with fused_weight_gradient_mlp_cuda") and not whole.advice


@pytest.mark.parametrize(
    ("loaded", "status", "text"),
    [
        (lambda: 91900, "ok", "importable, cuDNN 91900"),
        (lambda: 91400, "problem", "importable with cuDNN 91400, torch has 91900"),
        (None, "problem", "importable, not importable"),
    ],
)
def test_another_cudnn_than_torchs_is_a_problem_on_a_gpu(
    loaded: Any, status: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found_packages(monkeypatch, tmp_path, "transformer_engine/pytorch")
    torch = SimpleNamespace(backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91900)))
    monkeypatch.setattr(engine_checks, "has_gpu", lambda: True)
    monkeypatch.setattr(engine_checks, "torch_or_none", lambda: torch)
    extension = SimpleNamespace(get_cudnn_version=loaded) if loaded else None
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", extension)  # type: ignore[arg-type]
    check = engine_checks.check_engine()
    assert check.status == status and check.found.startswith(text)
    assert ("LD_LIBRARY_PATH" in check.advice) == ("torch has" in text)


def test_flash_attention_is_listed_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"flash-attn-3": "3.0.0"}
    monkeypatch.setattr(engine_checks, "installed", versions.get)
    assert engine_checks.check_flash() == Check("flash-attention", "ok", "flash-attn-3 3.0.0")
    versions.clear()
    assert engine_checks.check_flash().status == "absent"
