"""One check per thing that training needs or may use; none of them builds or downloads."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import megatron_magi
from megatron_magi import HeadShape, MagiConfig, build
from megatron_magi.core.kernel.backend import choose_backend_name, is_hopper
from megatron_magi.core.kernel.flex_attn import flex_flash_attn_func
from megatron_magi.core.plan import make_attn_plan
from megatron_magi.masks import causal

OLDEST_PYTHON = (3, 10)
OLDEST_NVCC = (12, 3)


@dataclass(frozen=True)
class Check:
    """What was found, and what to do about it."""

    name: str
    status: Literal["ok", "absent", "problem"]
    """absent: not there, and what is there runs without it."""
    found: str
    advice: str = ""


def all_checks() -> list[Check]:
    """From the interpreter up to what Megatron may use."""
    nvcc = check_nvcc()
    return [
        check_python(),
        Check("megatron_magi", "ok", f"{megatron_magi.__version__}, planner compiled"),
        check_torch(),
        check_gpu(),
        check_driver(),
        nvcc,
        check_cuda_library(nvcc),
        check_megatron(),
        _package("transformer-engine", "transformer_engine",
                 "optional: layers are Megatron's own without it"),
        check_apex(),
        _package("omegaconf", "omegaconf", "for recipes: pip install 'megatron-magi[train]'"),
        _package("matplotlib", "matplotlib", "for pictures: pip install 'megatron-magi[viz]'"),
        _package("ninja", "ninja", "optional: only other packages' builds use it"),
    ]  # fmt: skip


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return Check("python", "ok", version)
    return Check("python", "problem", version, "install Python 3.10 or newer")


def check_torch() -> Check:
    cuda = torch.version.cuda
    return Check("torch", "ok", f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'CPU'} build)")


def check_gpu() -> Check:
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
        advice = str(error).split("; ", 1)[1] if torch.cuda.is_available() else ""
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
    ready = build._newest_for_sources()
    if ready is not None:
        return Check("CUDA library", "ok", f"built, {ready}")
    if nvcc.status == "ok":
        return Check(
            "CUDA library", "ok", "not built yet",
            "built at first use on a Hopper GPU (minutes), or now: python -m megatron_magi.build",
        )  # fmt: skip
    if torch.cuda.is_available() and is_hopper(torch.device("cuda", 0)):
        return Check(
            "CUDA library", "problem", "not built, and there is no nvcc to build it",
            "install the CUDA toolkit 12.3 or newer, copy a built megatron_magi/_lib here, or set "
            "kernel_backend: flex",
        )  # fmt: skip
    return Check("CUDA library", "absent", "not built", "needs nvcc 12.3; runs on Hopper GPUs only")


def check_megatron() -> Check:
    try:
        from megatron_magi.adapter import MEGATRON_VERSION
    except ImportError as error:
        return Check("megatron-core", "absent", _installed("megatron-core") or "none", str(error))
    return Check("megatron-core", "ok", str(MEGATRON_VERSION))


def check_apex() -> Check:
    """NVIDIA's, which has no package on PyPI; the one that is there has only the name."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Check(
            "apex", "absent", "none",
            "optional: Megatron uses torch's norms and Adam without it; NVIDIA's is built from "
            "github.com/NVIDIA/apex, PyPI's package of that name is another",
        )  # fmt: skip
    folders = spec.submodule_search_locations or ()
    if any((Path(folder) / "multi_tensor_apply").is_dir() for folder in folders):
        return Check("apex", "ok", _installed("apex") or "importable")
    return Check(
        "apex", "absent", "another package of this name, not NVIDIA's",
        "uninstall it; Megatron uses torch's norms and Adam without NVIDIA's",
    )  # fmt: skip


def layer_choice(checks: list[Check]) -> tuple[str, str]:
    """Which layer specs a model has here, as Megatron's --transformer-impl calls them, and why."""
    found = {c.name for c in checks if c.status == "ok"}
    if "transformer-engine" in found:
        return "transformer_engine", (
            "TransformerEngine's norms and linear layers, our core attention in place of its own"
        )
    norms = "apex's norms" if "apex" in found else "torch's norms (ours under sequence parallelism)"
    return "local", (
        f"Megatron's linear layers and {norms}, as there is no TransformerEngine: pass "
        f"--transformer-impl local; hybrid models: --spec megatron_magi.adapter.hybrid_spec "
        f"hybrid_local_spec"
    )


def kernel_choice(checks: list[Check]) -> tuple[str, str]:
    """What kernel_backend "auto" runs for bf16 on this machine, and why."""
    if not torch.cuda.is_available():
        return "reference", "blockwise PyTorch on the CPU, because torch has no GPU"
    device = torch.device("cuda", 0)
    name = choose_backend_name(device, torch.bfloat16)
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    library = next(c for c in checks if c.name == "CUDA library")
    reasons = {
        "cuda": f"our Hopper kernel, because the GPU is {capability}; library: {library.found}",
        "flex": f"torch FlexAttention, because the GPU is {capability} and ours needs sm_90",
        "reference": "blockwise PyTorch",
    }
    return name, f"{reasons[name]} (fp32 and fp64 run on the reference)"


def transport_choice() -> tuple[str, str]:
    """What carries key rows between ranks."""
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return "nccl", f"all_to_all with uneven splits over NCCL {version}, as tensors are on GPUs"
    if torch.distributed.is_gloo_available():
        return "gloo", "all_to_all with uneven splits over gloo, as tensors are on the CPU"
    return "none", "this torch has neither NCCL nor gloo; only one rank can run"


def smoke_test() -> Check:
    """A plan, and a small causal attention against torch's own; never builds anything."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(64, 2, 64, generator=generator).to(device) for _ in range(4)]
    q, k, v = (x.clone().requires_grad_() for x in made[:3])
    try:
        make_attn_plan(causal(64), 4, HeadShape(2, 2, 64), MagiConfig())
        out, _ = flex_flash_attn_func(q, k, v, slices=causal(64), backend="reference")
        got = [out, *torch.autograd.grad(out, (q, k, v), made[3])]
        want_out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
        ).transpose(0, 1)
        want = [want_out, *torch.autograd.grad(want_out, (q, k, v), made[3])]
    except Exception as error:  # whatever is broken here is what the command is for
        return Check("attention", "problem", f"{type(error).__name__}: {error}", "see the message")
    worst = max(float((a - b).detach().abs().max()) for a, b in zip(got, want, strict=True))
    if worst < 1e-4:
        return Check("attention", "ok", f"planned and tried on the {device.type}: forward and "
                     f"backward agree with torch's to {worst:.0e}")  # fmt: skip
    return Check("attention", "problem", f"differs from torch's by {worst:.1e}", "report this")


def _package(name: str, module: str, advice: str) -> Check:
    if importlib.util.find_spec(module) is None:
        return Check(name, "absent", "none", advice)
    return Check(name, "ok", _installed(name) or "importable")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
