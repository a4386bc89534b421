"""Checks that attention works here: a small case is planned, run and compared with torch."""

from __future__ import annotations

from megatron_magi.cli.system_checks import Check, has_gpu
from megatron_magi.requirements import MissingRequirement, check_requirements


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
