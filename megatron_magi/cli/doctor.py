"""Reports installed packages, the kernel, transport and layers that will run, and remedies.

Exit code 0: attention runs here, and everything named with --require is there. 1: not.

examples:
  megatron-magi doctor
  megatron-magi doctor --require megatron cuda     a gate for a training image
  megatron-magi doctor --json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from megatron_magi.cli.check_result import Check, has_gpu, torch_or_none
from megatron_magi.cli.parser import add_output_options
from megatron_magi.cli.system_checks import all_checks
from megatron_magi.requirements import MissingRequirement, check_package, check_requirements

REQUIRABLE = ("megatron", "cuda", "gpu")
MARKS = {"ok": "ok", "absent": "--", "problem": "!!"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--require", nargs="+", choices=REQUIRABLE, default=[],
        help="fail unless it is there: megatron (a supported megatron-core), gpu (a fused kernel), "
        "cuda (the Hopper kernel, built or buildable)",
    )  # fmt: skip
    add_output_options(parser)


def run(options: argparse.Namespace) -> int:
    """Check, print, 0 or 1."""
    checks = all_checks()
    kernel, kernel_why = kernel_choice(checks)
    transport, transport_why = transport_choice()
    layers, layers_why = layer_choice(checks)
    tried = smoke_test()
    ok, verdict = judge([*checks, tried], kernel, options.require)
    if options.json:
        print(json.dumps({
            "ok": ok, "verdict": verdict,
            "kernel": {"name": kernel, "why": kernel_why},
            "transport": {"name": transport, "why": transport_why},
            "layers": {"name": layers, "why": layers_why},
            "checks": [asdict(c) for c in [*checks, tried]],
        }, indent=1))  # fmt: skip
    elif options.quiet:
        print("\n".join([*_lines(c for c in checks if c.status == "problem"), verdict]))
    else:
        print("\n".join(_lines([*checks, tried])))
        print(f"\nkernel     {kernel}: {kernel_why}")
        print(f"transport  {transport}: {transport_why}")
        print(f"layers     {layers}: {layers_why}")
        print(f"\n{verdict}")
    return 0 if ok else 1


def judge(checks: list[Check], kernel: str, required: list[str]) -> tuple[bool, str]:
    """True if training can start here, and why: problems first, then what is required."""
    found = {c.name: c for c in checks}
    failed = [f"{c.name}: {c.found}; {c.advice}" for c in checks if c.status == "problem"]
    met = {
        "megatron": found["megatron-core"].status == "ok",
        "gpu": kernel in ("cuda", "fa4", "flex"),
        "cuda": kernel == "cuda" and found["CUDA library"].status == "ok",
    }
    where = {"megatron": "megatron-core", "gpu": "GPU", "cuda": "CUDA library"}
    for name in required:
        if name == "cuda" and kernel != "cuda":
            failed.append(f"--require cuda: attention runs on {kernel}; it needs a Hopper GPU")
        elif not met[name]:
            check = found[where[name]]
            failed.append(f"--require {name}: {check.found}; {check.advice or 'see above'}")
    if failed:
        return (False, "not ready: " + "\n           ".join(failed))
    if not met["megatron"]:
        return (True, "ready for attention; training needs megatron-core (see above)")
    return (True, f"ready: trains here with the {kernel} kernel")


def _lines(checks: object) -> list[str]:
    lines = []
    for check in checks:  # type: ignore[attr-defined]
        lines.append(f"{MARKS[check.status]}  {check.name:<20} {check.found}")
        if check.advice:
            lines.append(f"{'':<25}-> {check.advice}")
    return lines


def layer_choice(checks: list[Check]) -> tuple[str, str]:
    """The layer specs that a model gets here, by Megatron's --transformer-impl, and the reason."""
    found = {c.name for c in checks if c.status == "ok"}
    if "transformer-engine" in found:
        return "transformer_engine", (
            "TransformerEngine's norms and linear layers, magi's core attention in place of its own"
        )
    norms = (
        "apex's norms" if "apex" in found else "torch's norms (magi's under sequence parallelism)"
    )
    return "local", (
        f"Megatron's linear layers and {norms}, as there is no TransformerEngine: pass "
        f"--transformer-impl local; hybrid models: --spec megatron_magi.adapter.hybrid_spec "
        f"hybrid_local_spec"
    )


def kernel_choice(checks: list[Check]) -> tuple[str, str]:
    """The kernel that "auto" selects for bf16 on this machine, and the reason."""
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
        "cuda": f"the Hopper kernel, because the GPU is {capability}; library: {library.found}",
        "fa4": f"FlashAttention-4 with magi's masks, because the GPU is {capability}",
        "flex": f"torch FlexAttention, because the GPU is {capability} and magi needs sm_90",
        "reference": "blockwise PyTorch",
    }
    return name, f"{reasons[name]} (fp32 and fp64 run on the reference)"


def transport_choice() -> tuple[str, str]:
    """The transport of key rows between ranks."""
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


def smoke_test() -> Check:
    """Plan a small causal attention and compare it with torch's own; never builds anything."""
    try:
        check_requirements()
    except MissingRequirement:
        return Check("attention", "absent", "not tried without what is missing above")
    on_gpu = has_gpu()
    try:
        worst = _difference_to_torch("cuda" if on_gpu else "cpu")
    except Exception as error:  # the command is there to report whatever is broken
        return Check("attention", "problem", f"{type(error).__name__}: {error}", "see the message")
    if worst < 1e-4:
        where = "cuda" if on_gpu else "cpu"
        return Check("attention", "ok", f"planned and tried on the {where}: forward and "
                     f"backward agree with torch's to {worst:.0e}")  # fmt: skip
    return Check("attention", "problem", f"differs from torch's by {worst:.1e}", "report this")


def _difference_to_torch(device: str) -> float:
    """Largest difference of a small causal attention, forward and backward."""
    import torch

    from megatron_magi import HeadShape, MagiConfig, flex_flash_attn_func
    from megatron_magi.core.plan import make_attn_plan
    from megatron_magi.masks import causal

    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(64, 2, 64, generator=generator).to(device) for _ in range(4)]
    q, k, v = (x.clone().requires_grad_() for x in made[:3])
    make_attn_plan(causal(64), 4, HeadShape(2, 2, 64), MagiConfig())
    out, _ = flex_flash_attn_func(q, k, v, slices=causal(64), backend="reference")
    got = [out, *torch.autograd.grad(out, (q, k, v), made[3])]
    want_out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    ).transpose(0, 1)
    want = [want_out, *torch.autograd.grad(want_out, (q, k, v), made[3])]
    return max(float((a - b).detach().abs().max()) for a, b in zip(got, want, strict=True))
