"""One check per thing that training needs or may use; none of them builds or downloads.

They run without torch and without the compiled planner, and report if these are missing.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys

import megatron_magi
from megatron_magi import build
from megatron_magi.cli.check_result import Check, has_gpu, installed, torch_or_none
from megatron_magi.cli.engine_checks import check_apex, check_engine, check_flash
from megatron_magi.requirements import (
    PACKAGES,
    MissingRequirement,
    check_package,
    check_planner,
)

OLDEST_PYTHON = (3, 11)
OLDEST_NVCC = (12, 3)


def all_checks() -> list[Check]:
    """All checks, from the interpreter to the packages that Megatron may use."""
    nvcc = check_nvcc()
    return [
        check_python(),
        check_ours(),
        check_needed("numpy"),
        check_torch(),
        check_gpu(),
        check_driver(),
        nvcc,
        check_cuda_library(nvcc),
        check_megatron(),
        check_engine(),
        check_flash(),
        check_apex(),
        _package("omegaconf", "omegaconf", "for training: pip install 'megatron-magi[train]'"),
        _package("matplotlib", "matplotlib", "for pictures: pip install 'megatron-magi[viz]'"),
    ]  # fmt: skip


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return Check("python", "ok", version)
    return Check("python", "problem", version, "install Python 3.11 or newer")


def check_ours() -> Check:
    """This package's version, and whether its planner is compiled where it was imported from."""
    version = megatron_magi.__version__
    try:
        check_planner()
    except MissingRequirement as error:
        found, _, advice = str(error).partition(", got ")[2].partition("; ")
        return Check("megatron_magi", "problem", f"{version}, its planner: {found}", advice)
    return Check("megatron_magi", "ok", f"{version}, planner compiled")


def check_needed(name: str) -> Check:
    """A package that nothing here works without."""
    try:
        package = check_package(name)
    except MissingRequirement as error:
        found = str(error).partition(", got ")[2].partition("; ")[0]
        return Check(name, "problem", found, PACKAGES[name])
    return Check(name, "ok", str(package.__version__))


def check_torch() -> Check:
    found = check_needed("torch")
    if found.status != "ok":
        return found
    torch = check_package("torch")
    cuda = torch.version.cuda
    return Check("torch", "ok", f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'CPU'} build)")


def check_gpu() -> Check:
    torch = torch_or_none()
    if torch is None:
        return Check("GPU", "absent", "not looked for without torch")
    if not torch.cuda.is_available():
        if torch.version.cuda is None and shutil.which("nvidia-smi"):
            return Check(
                "GPU", "problem", "there is an NVIDIA driver, but torch is a CPU build",
                "install a CUDA build of torch (pip install torch from its CUDA index)",
            )  # fmt: skip
        advice = "attention runs on the CPU, for trying things out"
        if torch.version.cuda is not None:
            advice = "torch sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES; " + advice
        return Check("GPU", "absent", "none", advice)
    names = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        names.append(f"{p.name} (sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB)")
    kinds = [f"{names.count(n)} x {n}" for n in dict.fromkeys(names)]
    return Check("GPU", "ok", ", ".join(kinds))


def check_driver() -> Check:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Check("driver", "absent", "no nvidia-smi")
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    text = _output(query)
    if text is None:
        return Check("driver", "problem", "nvidia-smi fails", "reinstall or load the driver")
    return Check("driver", "ok", text.split()[0] if text.split() else "no GPU listed")


def check_nvcc() -> Check:
    try:
        path = build.find_nvcc()
    except build.CudaBuildError as error:
        advice = str(error).split("; ", 1)[1] if has_gpu() else ""
        return Check("nvcc", "absent", "none in CUDA_HOME, PATH or /usr/local/cuda", advice)
    version = re.search(r"release (\d+)\.(\d+)", _output([path, "--version"]) or "")
    if version is None:
        return Check("nvcc", "absent", f"{path} does not run", "reinstall the CUDA toolkit")
    found = f"{version[1]}.{version[2]} ({path})"
    if (int(version[1]), int(version[2])) < OLDEST_NVCC:
        return Check("nvcc", "absent", found, "the Hopper kernel needs 12.3 or newer to be built")
    return Check("nvcc", "ok", found)


def check_cuda_library(nvcc: Check) -> Check:
    """Our Hopper kernels: built, buildable, or neither."""
    ready = build.built_library()
    if ready is not None:
        return Check("CUDA library", "ok", f"built, {ready}")
    if nvcc.status == "ok":
        return Check(
            "CUDA library", "ok", "not built yet",
            "built at first use on a Hopper GPU (minutes), or now: python -m megatron_magi.build",
        )  # fmt: skip
    if _has_hopper():
        return Check(
            "CUDA library", "problem", "not built, and there is no nvcc to build it",
            "install the CUDA toolkit 12.3 or newer, copy a built megatron_magi.libs here, or set "
            "kernel_backend: flex",
        )  # fmt: skip
    return Check("CUDA library", "absent", "not built", "needs nvcc 12.3; runs on Hopper GPUs only")


def check_megatron() -> Check:
    try:
        from megatron_magi.adapter import MEGATRON_VERSION
    except ImportError as error:
        return Check("megatron-core", "absent", installed("megatron-core") or "none", str(error))
    return Check("megatron-core", "ok", str(MEGATRON_VERSION))


def _has_hopper() -> bool:
    if not has_gpu():
        return False
    torch = check_package("torch")
    return bool(torch.cuda.get_device_capability(torch.device("cuda", 0))[0] == 9)


def _package(name: str, module: str, advice: str) -> Check:
    if importlib.util.find_spec(module) is None:
        return Check(name, "absent", "none", advice)
    return Check(name, "ok", installed(name) or "importable")


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
