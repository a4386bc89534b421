"""Checks of what Megatron's layers run on: TransformerEngine, its cuDNN, FlashAttention, apex.

Our attention needs none of them. They decide which layers a model has, and what stock Megatron, the
usual yardstick, computes attention with.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from megatron_magi.cli.check_result import Check, has_gpu, installed, torch_or_none

FLASH_PACKAGES = ("flash-attn", "flash-attn-3")


def check_engine() -> Check:
    """TransformerEngine, and on a GPU whether it loads the cuDNN of torch: with another one it
    finds no attention for packed rows, and stock Megatron stops."""
    name = "transformer-engine"
    if importlib.util.find_spec("transformer_engine") is None:
        return Check(name, "absent", "none", "optional: layers are Megatron's own without it")
    version = installed(name) or "importable"
    if not has_gpu():
        return Check(name, "ok", version)
    try:
        torch: Any = torch_or_none()
        loaded = importlib.import_module("transformer_engine_torch").get_cudnn_version()
        wanted = torch.backends.cudnn.version()
    except (ImportError, OSError, AttributeError) as error:
        return Check(name, "problem", f"{version}, not importable ({error})", "install it anew")
    if loaded != wanted:
        return Check(
            name, "problem", f"{version} with cuDNN {loaded}, torch has {wanted}",
            "put the folder of torch's libcudnn_graph.so.9 first on LD_LIBRARY_PATH: with another "
            "cuDNN, TransformerEngine finds no attention for packed rows (magi does not need it)",
        )  # fmt: skip
    return Check(name, "ok", f"{version}, cuDNN {loaded}")


def check_flash() -> Check:
    """FlashAttention, which TransformerEngine's attention may use; ours does not."""
    found = [f"{name} {version}" for name in FLASH_PACKAGES if (version := installed(name))]
    if found:
        return Check("flash-attention", "ok", ", ".join(found))
    return Check(
        "flash-attention", "absent", "none", "optional: only TransformerEngine's attention uses it"
    )


def check_apex() -> Check:
    """NVIDIA's apex has no package on PyPI; the package of that name is another."""
    spec = importlib.util.find_spec("apex")
    fusion = _gradient_fusion()
    if spec is None:
        return Check(
            "apex", "absent", f"none{fusion}",
            "optional: Megatron uses torch's norms and Adam without it, and needs "
            "--no-gradient-accumulation-fusion; NVIDIA's is built from github.com/NVIDIA/apex, "
            "PyPI's package of that name is another",
        )  # fmt: skip
    folders = spec.submodule_search_locations or ()
    if any((Path(folder) / "multi_tensor_apply").is_dir() for folder in folders):
        advice = "" if fusion else "pass --no-gradient-accumulation-fusion, or build it with it"
        return Check("apex", "ok", f"{installed('apex') or 'importable'}{fusion}", advice)
    return Check(
        "apex", "absent", f"another package of this name, not NVIDIA's{fusion}",
        "uninstall it; Megatron uses torch's norms and Adam without NVIDIA's",
    )  # fmt: skip


def _gradient_fusion() -> str:
    """Megatron's linear layers ask for this module of apex by its own name."""
    there = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return ", with fused_weight_gradient_mlp_cuda" if there else ""
