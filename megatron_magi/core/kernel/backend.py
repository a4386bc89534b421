"""What a kernel backend is, and which one runs."""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import torch
from torch import Tensor

from megatron_magi.checks import word
from megatron_magi.core.kernel.slice_table import SliceTable

logger = logging.getLogger("megatron_magi")

BACKENDS = ("auto", "cuda", "flex", "reference")

OutLse = tuple[Tensor, Tensor]
Pair = tuple[Tensor, Tensor]


class AttnBackend(Protocol):
    """Attention of q over the slices of a table.

    Shapes: q [T, H, D], k [S, G, D], v [S, G, E] with H a multiple of G, any strides with the last
    dimension contiguous; out [T, H, E]; lse and delta [T, H]. Not every backend takes E other than
    D. The accumulation dtype is fp32, fp64 for fp64 inputs. lse is the natural log of the sum of
    exp of scaled scores; -inf with out = 0 where a row sees nothing.
    """

    name: str

    def forward(
        self,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        table: SliceTable,
        softmax_scale: float,
        *,
        prev: OutLse | None = None,
        into: OutLse | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> OutLse:
        """(out, lse). With ``prev`` (both in the accumulation dtype): merged into it in place and
        returned. With ``into``: rows that slices cover are written there, the others stay, and it
        is returned. ``out_dtype`` of out otherwise; None: the dtype of q."""
        ...

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        lse_TH: Tensor,
        delta_TH: Tensor | None,
        table: SliceTable,
        softmax_scale: float,
        *,
        out: Tensor | None = None,
        dq_acc: Tensor | None = None,
        grad_dtype: torch.dtype | None = None,
        dkv: Pair | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) in ``grad_dtype``: the accumulation dtype (None) or that of q.

        ``lse_TH`` is the final lse over all stages and ``delta_TH`` the row sum of out * dout, so
        that partial gradients of several stages simply add. ``out`` [T, H, E], the final one, may
        be given instead, ``delta_TH`` None. ``dq_acc``, in the accumulation dtype:
        dq is added to it in place and it is returned. ``dkv``: where dk and dv are written, in
        ``grad_dtype``, any strides with the last dimension contiguous; None: new tensors.
        """
        ...


def put_rows(rows: OutLse, table: SliceTable, into: OutLse) -> OutLse:
    """The rows that slices cover, put where they belong; see AttnBackend.forward."""
    for start, end in table.covered_rows.tolist():
        for target, made in zip(into, rows, strict=True):
            target[start:end] = made[start:end]
    return into


def deliver(grads: Pair, dkv: Pair | None) -> Pair:
    """Gradients of keys and values where the caller wants them; see AttnBackend.backward."""
    if dkv is None:
        return grads
    for target, grad in zip(dkv, grads, strict=True):
        target.copy_(grad)
    return dkv


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def has_one_width(q: Tensor, v: Tensor) -> bool:
    """Whether values are as wide as queries and keys; in multi-latent attention they are not."""
    return q.shape[-1] == v.shape[-1]


def choose_backend_name(device: torch.device, dtype: torch.dtype, one_width: bool = True) -> str:
    """What "auto" means: cuda on Hopper, flex on other GPUs, reference on the CPU.

    float32 and float64 run on the reference everywhere: the CUDA kernels are bf16 and fp16. They
    also take values of the width of keys only (``one_width``); flex takes others.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "reference"
    return "cuda" if one_width and is_hopper(device) else "flex"


@functools.lru_cache(maxsize=64)
def select_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    one_width: bool = True,
) -> AttnBackend:
    """The backend called ``name`` ("auto" chooses), logged when first chosen for its inputs.

    Args:
        one_width: values are as wide as keys; see ``has_one_width``.

    Raises:
        ValueError: unknown name.
        NotImplementedError: the named backend cannot run on this device, dtype or widths.
    """
    word(name, "kernel backend", BACKENDS)
    if name == "cuda" and not one_width:
        raise NotImplementedError(
            "the CUDA kernels take values as wide as queries and keys, got another width; "
            "use kernel_backend 'flex' or 'reference'"
        )
    chosen = choose_backend_name(device, dtype, one_width) if name == "auto" else name
    backend = _create(chosen, device, dtype, deterministic)
    logger.info("attention kernel: %s (asked for %s) on %s, %s", chosen, name, device, dtype)
    return backend


def _create(
    name: str, device: torch.device, dtype: torch.dtype, deterministic: bool
) -> AttnBackend:
    # Imported here: the GPU backends load compilers and libraries that a CPU user has not got.
    if name == "reference":
        from megatron_magi.core.kernel.reference import ReferenceBackend

        return ReferenceBackend()
    if device.type != "cuda":
        raise NotImplementedError(
            f"kernel backend {name!r} needs CUDA tensors, got {device}; "
            f"use 'auto' or 'reference' on the CPU"
        )
    if name == "flex":
        from megatron_magi.core.kernel.flex_fallback import FlexBackend

        return FlexBackend()
    from megatron_magi.core.kernel.cuda_backend import CudaBackend

    return CudaBackend(device, dtype, deterministic=deterministic)
