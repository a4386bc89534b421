"""What each check finds on a machine, and what it says to do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_magi import build
from megatron_magi.cli import system_checks
from megatron_magi.cli.check_result import Check
from megatron_magi.requirements import MissingRequirement


def test_an_old_compiler_builds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(build, "find_nvcc", lambda: str(nvcc))
    monkeypatch.setattr(build, "built_library", lambda: None)
    check = system_checks.check_nvcc()
    assert check.status == "absent" and check.found.startswith("11.8") and "12.3" in check.advice
    assert system_checks.check_cuda_library(check).status == "absent"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.41'\n")
    check = system_checks.check_nvcc()
    assert check.status == "ok"
    assert "python -m megatron_magi.build" in system_checks.check_cuda_library(check).advice


@pytest.mark.parametrize("capability, status", [((9, 0), "problem"), ((8, 0), "absent")])
def test_a_library_that_cannot_be_built_is_a_problem_on_hopper_alone(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], status: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(build, "built_library", lambda: None)
    nvcc = Check("nvcc", "absent", "none")
    assert system_checks.check_cuda_library(nvcc).status == status
    monkeypatch.setattr(build, "built_library", lambda: Path("lib.so"))
    assert system_checks.check_cuda_library(nvcc) == Check("CUDA library", "ok", "built, lib.so")


def test_a_cpu_torch_beside_a_driver_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(system_checks.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    check = system_checks.check_gpu()
    assert check.status == "problem" and "install a CUDA build of torch" in check.advice


@pytest.mark.parametrize(
    "cuda, advice", [(None, "attention runs on the CPU"), ("12.9", "torch sees no GPU")]
)
def test_without_a_gpu_the_build_of_torch_decides_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, advice: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr(system_checks.shutil, "which", lambda tool: None)
    check = system_checks.check_gpu()
    assert (check.status, check.found) == ("absent", "none") and check.advice.startswith(advice)


def test_equal_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [("H200", 9, 0, 141), ("A100", 8, 0, 80), ("H200", 9, 0, 141)]
    made = [SimpleNamespace(name=n, major=a, minor=b, total_memory=g * 2**30)
            for n, a, b, g in cards]  # fmt: skip
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(made))
    monkeypatch.setattr("torch.cuda.get_device_properties", made.__getitem__)
    found = "2 x H200 (sm_90, 141 GiB), 1 x A100 (sm_80, 80 GiB)"
    assert system_checks.check_gpu() == Check("GPU", "ok", found)


@pytest.mark.parametrize(
    "script, status, found",
    [
        ("echo 570.1; echo 570.1", "ok", "570.1"),
        ("true", "ok", "no GPU listed"),
        ("exit 9", "problem", "nvidia-smi fails"),
    ],
)
def test_the_driver_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, status: str, found: str
) -> None:
    monkeypatch.setattr(system_checks.shutil, "which", lambda tool: None)
    assert system_checks.check_driver().status == "absent"
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(system_checks.shutil, "which", lambda name: str(tool))
    check = system_checks.check_driver()
    assert (check.status, check.found) == (status, found)


def test_a_missing_megatron_is_absent_and_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron_magi.adapter", None)
    check = system_checks.check_megatron()
    assert check.status == "absent" and "megatron_magi.adapter" in check.advice


def test_a_missing_planner_or_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system_checks.check_ours().found.endswith("planner compiled")
    assert system_checks.check_torch().found.endswith(" build)")

    def missing(name: str = "its compiled planner") -> None:
        raise MissingRequirement(f"megatron_magi needs {name}, got none of it; do this")

    monkeypatch.setattr(system_checks, "check_planner", missing)
    monkeypatch.setattr(system_checks, "check_package", missing)
    ours = system_checks.check_ours()
    assert (ours.status, ours.advice) == ("problem", "do this")
    assert ours.found.endswith(", its planner: none of it")
    torch = system_checks.check_torch()
    assert (torch.status, torch.found) == ("problem", "none of it")
    assert torch.advice.startswith("pip install torch")
    assert system_checks.check_gpu().status == "absent" and not system_checks.has_gpu()


def test_an_old_python_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system_checks.check_python().status == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    check = system_checks.check_python()
    assert (check.status, check.found) == ("problem", "3.9.18") and "3.11" in check.advice
