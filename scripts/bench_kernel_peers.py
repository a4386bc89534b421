"""What the kernel benchmark runs: ours and every peer that can be imported.

An implementation is a function (direction, mask name, mask, q, k, v, dout) -> a call without
arguments that runs one forward or backward on the current stream, or None if it cannot do that
mask. q [T, H, D], k and v [S, G, D], all bf16 on the GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bench_kernel_masks import SHORT_DOCS, WINDOW, cu_seqlens, documents
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_magi import AttnMask

Call = Callable[[], Any]


def ours(
    direction: str, name: str, mask: AttnMask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Call | None:
    """The CUDA backend below the op, as a training step with a cached plan calls it."""
    from megatron_magi.core.kernel.backend import select_backend
    from megatron_magi.core.kernel.ops import row_delta
    from megatron_magi.core.kernel.slice_table import SliceTable

    kernel = select_backend("cuda", q.device, q.dtype)
    table = SliceTable(mask.slices, mask.total_seqlen_q, mask.total_seqlen_k)
    scale = q.shape[-1] ** -0.5
    if direction == "fwd":
        return lambda: kernel.forward(q, k, v, table, scale)
    out, lse = kernel.forward(q, k, v, table, scale)

    def backward() -> Any:
        delta = row_delta(out, dout, torch.float32)
        dq, dk, dv = kernel.backward(dout, q, k, v, lse, delta, table, scale)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    return backward


def cudnn(
    direction: str, name: str, mask: AttnMask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Call | None:
    """cuDNN: dense masks through PyTorch's SDPA, packed and windowed ones through its frontend."""
    if name not in ("full", "causal"):
        return _cudnn_packed(direction, name, q, k, v, dout)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        views = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                *views, is_causal=name == "causal", enable_gqa=True
            )

    if direction == "fwd":
        return lambda: forward(q, k, v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, grad = forward(*leaves), dout.transpose(0, 1).unsqueeze(0)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _cudnn_packed(
    direction: str, name: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Call | None:
    lengths = documents_of(name, q.shape[0])
    if lengths is None or importlib.util.find_spec("cudnn") is None:
        return None
    from bench_kernel_cudnn import packed_call

    causal = name in ("packed_causal", "swa1024")
    window = WINDOW if name == "swa1024" else None
    return packed_call(direction, q, k, v, dout, lengths, causal, window)


def documents_of(name: str, seqlen: int) -> list[int] | None:
    """Documents of the masks that dense kernels with document lengths can do."""
    if name in ("packed_full", "packed_causal"):
        return documents(SHORT_DOCS, seqlen)
    if name == "tiny64":
        return [64] * (seqlen // 64)
    return [seqlen] if name in ("full", "causal", "swa1024") else None


def _rule(name: str, seqlen: int, device: torch.device) -> Callable | None:
    """The mask as a FlexAttention rule; None for masks that are not benchmarked with it."""

    def owners(lengths: list[int]) -> Tensor:
        index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        return index.to(device)

    if name == "swa1024":
        return lambda b, h, i, j: (j <= i) & (i - j < WINDOW)
    if name in ("packed_full", "packed_causal"):
        doc = owners(documents(SHORT_DOCS, seqlen))
        if name == "packed_full":
            return lambda b, h, i, j: doc[i] == doc[j]
        return lambda b, h, i, j: (doc[i] == doc[j]) & (j <= i)
    if name == "causal":
        return lambda b, h, i, j: j <= i
    return (lambda b, h, i, j: i >= 0) if name == "full" else None


def flex(
    direction: str, name: str, mask: AttnMask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Call | None:
    """FlexAttention, compiled; half a minute for each mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rule = _rule(name, q.shape[0], q.device)
    if rule is None:
        return None
    block_mask = create_block_mask(rule, None, None, q.shape[0], k.shape[0], device=q.device)
    attend = torch.compile(flex_attention)
    leaves = [x.detach().transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
    if direction == "fwd":
        return lambda: attend(*leaves, block_mask=block_mask, enable_gqa=True)
    out, grad = attend(*leaves, block_mask=block_mask, enable_gqa=True), dout.transpose(0, 1)[None]
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _flash(package: Any) -> Callable[..., Call | None]:
    """FlashAttention 3 and 4 share an interface: varlen with a window."""

    def make(
        direction: str, name: str, mask: AttnMask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
    ) -> Call | None:
        lengths = documents_of(name, q.shape[0])
        if lengths is None:
            return None
        cu = torch.tensor(cu_seqlens(lengths), dtype=torch.int32, device=q.device)
        causal = name in ("causal", "packed_causal", "swa1024")
        window = (WINDOW - 1, 0) if name == "swa1024" else (-1, -1)

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result = package.flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=max(lengths),
                max_seqlen_k=max(lengths), causal=causal, window_size=window,
            )  # fmt: skip
            return result[0] if isinstance(result, tuple) else result

        if direction == "fwd":
            return lambda: forward(q, k, v)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = forward(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return make


def available() -> dict[str, Callable[..., Call | None]]:
    """Implementations by name, as far as they can be imported here."""
    found: dict[str, Callable[..., Call | None]] = {"ours": ours, "cudnn": cudnn, "flex": flex}
    for name, module in (("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute.interface")):
        try:
            package = __import__(module, fromlist=["flash_attn_varlen_func"])
        except ImportError:
            continue
        found[name] = _flash(package)
    return found


__all__ = ["Call", "available"]
