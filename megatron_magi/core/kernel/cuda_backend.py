"""The Hopper backend: our CUDA kernels behind the AttnBackend protocol."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_magi.core.cuda_library import load_kernels
from megatron_magi.core.kernel.backend import OutLse, Pair
from megatron_magi.core.kernel.cuda_forward import cuda_forward
from megatron_magi.core.kernel.row_delta import row_delta
from megatron_magi.core.kernel.slice_table import SliceTable

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
MIN_SCALE = {torch.bfloat16: 1e-30, torch.float16: 1e-6}
"""The backward divides lse by softmax_scale and keeps the quotient in parts of this dtype."""


class CudaBackend:
    """Forward and backward on sm_90a.

    Raises (on construction):
        NotImplementedError: not a Hopper GPU, or a dtype without kernels.
        CudaBuildError: the library is not there and cannot be built.
    """

    name = "cuda"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, deterministic: bool = False
    ) -> None:
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            raise NotImplementedError(
                f"the CUDA kernels need a Hopper GPU (compute capability 9.0), got "
                f"{capability[0]}.{capability[1]} on {device}; use the backend 'flex'"
            )
        if dtype not in DTYPES:
            raise NotImplementedError(
                f"the CUDA kernels take bf16 and fp16, got {dtype}; cast the inputs or use "
                f"the backend 'reference'"
            )
        self.deterministic = deterministic
        load_kernels(device, dtype)

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
        """See AttnBackend."""
        check_inputs(q_THD, k_SGD, v_SGD, table, softmax_scale)
        check_output(q_THD, prev, into, out_dtype)
        return cuda_forward(q_THD, k_SGD, v_SGD, table, softmax_scale, prev, into, out_dtype)

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
        """See AttnBackend."""
        from megatron_magi.core.kernel.cuda_backward import cuda_backward

        check_inputs(q_THD, k_SGD, v_SGD, table, softmax_scale)
        if out is not None and not out.dtype == dout_THD.dtype == q_THD.dtype:
            # out was asked for in fp32: the kernel would have it rounded.
            delta_TH, out = row_delta(out, dout_THD, lse_TH.dtype), None
        dout_THD = dout_THD.to(q_THD.dtype)
        return cuda_backward(
            dout_THD, q_THD, k_SGD, v_SGD, lse_TH, delta_TH, table, softmax_scale,
            out=out, dq_acc=dq_acc, grad_dtype=grad_dtype, dkv=dkv,
            deterministic=self.deterministic,
        )  # fmt: skip


def check_inputs(q: Tensor, k: Tensor, v: Tensor, table: SliceTable, softmax_scale: float) -> None:
    """What the kernels demand beyond flex_attn.check_qkv."""
    if v.shape[-1] != q.shape[-1]:
        raise NotImplementedError(
            f"the CUDA kernels take values as wide as queries and keys, got head_dim "
            f"{v.shape[-1]} and {q.shape[-1]}; use kernel_backend 'flex' or 'reference'"
        )
    if q.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(
            f"the CUDA kernels take head_dim {' or '.join(map(str, HEAD_DIMS))}, got "
            f"{q.shape[-1]}; pad the heads or use the backend 'flex'"
        )
    if q.dtype not in DTYPES:
        raise TypeError(f"the CUDA kernels take bf16 and fp16, got {q.dtype}; cast q, k and v")
    if q.shape[0] != table.num_q or k.shape[0] != table.num_k:
        raise ValueError(
            f"q and k must have the lengths the slices were made for, {table.num_q} and "
            f"{table.num_k}, got {q.shape[0]} and {k.shape[0]}; build the mask for these lengths"
        )
    least = MIN_SCALE.get(q.dtype, 0.0)
    if not least <= softmax_scale < math.inf:
        raise ValueError(
            f"softmax_scale must be at least {least} in {q.dtype} and finite, got {softmax_scale}; "
            f"move the sign or a smaller factor into q"
        )


def check_output(
    q: Tensor, prev: OutLse | None, into: OutLse | None, out_dtype: torch.dtype | None
) -> None:
    """Output dtype, an earlier result to continue from, or one of other rows."""
    given = into if prev is None else prev
    if given is None:
        if out_dtype not in (None, q.dtype, torch.float32):
            raise TypeError(
                f"out_dtype must be {q.dtype} or torch.float32, got {out_dtype}; cast the result"
            )
        return
    out, lse = given
    if prev is not None and out.dtype != torch.float32:
        raise TypeError(
            f"an earlier result must be fp32 to continue from, got out {out.dtype}; "
            f"ask for out_dtype=torch.float32 in the first stage"
        )
    if out.dtype not in (q.dtype, torch.float32) or lse.dtype != torch.float32:
        raise TypeError(
            f"an earlier result must be out in {q.dtype} or fp32 and lse in fp32, got "
            f"{out.dtype} and {lse.dtype}; pass what the first stage returned"
        )
    if out.shape != q.shape or lse.shape != q.shape[:2] or out.stride(2) != 1:
        raise ValueError(
            f"an earlier result must be out {list(q.shape)} (last dimension contiguous) and lse "
            f"{list(q.shape[:2])}, got {list(out.shape)} with strides {list(out.stride())} and "
            f"{list(lse.shape)}; pass what the first stage returned"
        )
