"""`megatron-magi doctor`: what it finds on a machine, and what it says to do."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_magi import build
from megatron_magi.cli import choices, doctor, smoke_test, system_checks
from megatron_magi.cli.system_checks import Check
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


def found_packages(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> list[Check]:
    """The doctor's checks of TransformerEngine and apex with packages of these paths alone."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name.split("/")[0] / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(folder)])
    for name in ("apex", "transformer_engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    engine = system_checks._package("transformer-engine", "transformer_engine", "optional")
    return [engine, system_checks.check_apex()]


def test_doctor_names_layers_without_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, apex = checks = found_packages(monkeypatch, tmp_path)
    assert engine.status == apex.status == "absent"
    assert "github.com/NVIDIA/apex" in apex.advice and "pip install" not in apex.advice
    name, why = choices.layer_choice(checks)
    assert name == "local" and "--transformer-impl local" in why and "hybrid_local_spec" in why


def test_doctor_names_layers_with_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = found_packages(
        monkeypatch, tmp_path, "transformer_engine/pytorch", "apex/multi_tensor_apply"
    )
    assert [c.status for c in checks] == ["ok", "ok"]
    name, why = choices.layer_choice(checks)
    assert name == "transformer_engine" and "our core attention" in why
    assert "apex's norms" in choices.layer_choice(checks[1:])[1]


def test_doctor_knows_the_other_apex(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, apex = checks = found_packages(monkeypatch, tmp_path, "apex/sessions")
    assert apex.status == "absent" and "not NVIDIA's" in apex.found and "uninstall" in apex.advice
    assert "torch's norms" in choices.layer_choice(checks)[1]


def test_doctor_requires_what_is_not_there(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, _ = run(capsys, "doctor", "--require", "gpu", "cuda", "-q")
    assert code == 1 and "not ready: --require gpu: none; " in out
    assert "--require cuda: attention runs on reference; it needs a Hopper GPU" in out


def test_doctor_names_a_missing_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron_magi.adapter", None)
    check = system_checks.check_megatron()
    assert check.status == "absent" and check.advice
    ready = doctor.judge([check, Check("CUDA library", "absent", "")], "reference", [])
    assert ready.ok and "training needs megatron-core" in ready.text
    refused = doctor.judge([check, Check("CUDA library", "absent", "")], "reference", ["megatron"])
    assert not refused.ok and "--require megatron" in refused.text


def test_doctor_judges_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(build, "find_nvcc", lambda: str(nvcc))
    monkeypatch.setattr(build, "_newest_for_sources", lambda: None)
    check = system_checks.check_nvcc()
    assert check.status == "absent" and check.found.startswith("11.8") and "12.3" in check.advice
    assert system_checks.check_cuda_library(check).status == "absent"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.41'\n")
    check = system_checks.check_nvcc()
    assert check.status == "ok"
    assert "python -m megatron_magi.build" in system_checks.check_cuda_library(check).advice


@pytest.mark.parametrize(
    "capability, name, why",
    [((9, 0), "cuda", "our Hopper kernel, because the GPU is sm_90"),
     ((8, 0), "flex", "torch FlexAttention, because the GPU is sm_80 and ours needs sm_90")],
)  # fmt: skip
def test_doctor_names_kernel_and_transport_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str, why: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    monkeypatch.setattr(build, "_newest_for_sources", lambda: None)
    library = system_checks.check_cuda_library(Check("nvcc", "absent", "none"))
    assert library.status == ("problem" if name == "cuda" else "absent")
    assert choices.kernel_choice([library])[0] == name
    assert why in choices.kernel_choice([library])[1]
    name, why = choices.transport_choice()
    assert name == "nccl" and "all_to_all with uneven splits over NCCL 2.27.3" in why


def test_doctor_sees_a_cpu_torch_beside_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(system_checks.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    check = system_checks.check_gpu()
    assert check.status == "problem" and "install a CUDA build of torch" in check.advice


def test_doctor_finds_broken_attention(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such op")

    monkeypatch.setattr(smoke_test, "_difference_to_torch", broken)
    code, out, _ = run(capsys, "doctor", "-q")
    assert code == 1 and "not ready: attention: RuntimeError: no such op" in out
