"""Which kernel, transport and layers run here, and why."""

from __future__ import annotations

from megatron_magi.cli.system_checks import Check, torch_or_none
from megatron_magi.requirements import MissingRequirement, check_package, check_requirements


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
    try:
        check_requirements()
    except MissingRequirement as error:
        return "none", str(error)
    torch = check_package("torch")
    if not torch.cuda.is_available():
        return "reference", "blockwise PyTorch on the CPU, because torch has no GPU"
    from megatron_magi.core.kernel.select import choose_backend_name

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
    torch = torch_or_none()
    if torch is None:
        return "none", "torch is not there"
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        nccl = f"all_to_all with uneven splits over NCCL {version}"
        if torch.cuda.get_device_capability(0) == (9, 0):
            return "symm_mem", (
                f"Hopper GPUs of one host read each other's memory; over several hosts, or if they "
                f"cannot: {nccl}"
            )
        return "nccl", f"{nccl}, as tensors are on GPUs"
    if torch.distributed.is_gloo_available():
        return "gloo", "all_to_all with uneven splits over gloo, as tensors are on the CPU"
    return "none", "this torch has neither NCCL nor gloo; only one rank can run"
