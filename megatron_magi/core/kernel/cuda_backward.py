"""The backward on Hopper: work list, workspaces and launch (csrc/flex_attn/bwd).

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_magi.core.cuda_library import (
    DTYPE_CODES,
    CudaKernelError,
    CudaLibrary,
    TensorView,
    cuda_library,
    loaded_cuda_library,
    on_device,
    stream_handle,
)
from megatron_magi.core.device_buffer import DeviceBuffer
from megatron_magi.core.kernel.backend import Pair
from megatron_magi.core.kernel.calls import must_dispatch
from megatron_magi.core.kernel.cuda_forward import aligned, empty_as
from megatron_magi.core.kernel.cuda_work import HeadsKey
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.native import solver


class BwdParams(ctypes.Structure):
    """MagiBwdParams of csrc/flex_attn/bwd/bwd_params.h."""

    _fields_ = [
        *(
            (name, TensorView)
            for name in ("q", "k", "v", "dout", "out", "dq_acc", "dq", "dk", "dv")
        ),
        ("lse", c_void_p),
        ("delta", c_void_p),
        ("lse_stride_token", c_int64),
        ("lse_stride_head", c_int64),
        ("delta_stride_token", c_int64),
        ("delta_stride_head", c_int64),
        *(
            (name, c_void_p)
            for name in ("stats", "partial", "items", "entries", "visits", "semaphores", "stream")
        ),
        *(
            (name, c_int32)
            for name in (
                "num_q", "num_k", "num_heads_q", "num_heads_kv", "head_dim", "dtype", "grad_dtype",
                "num_items", "num_splits", "heads_per_section", "clear_dq", "deterministic",
                "num_cells", "heads_inner", "descending",
            )
        ),
        ("softmax_scale", c_float),
    ]  # fmt: skip


class DeltaParams(ctypes.Structure):
    """MagiDeltaParams of csrc/flex_attn/bwd/bwd_params.h."""

    _fields_ = [
        ("out", TensorView),
        ("dout", TensorView),
        ("delta", c_void_p),
        ("stream", c_void_p),
        ("num_tokens", c_int32),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("dtype", c_int32),
    ]


@dataclass(frozen=True)
class BwdWork:
    """A work list on the device and a params struct with everything in it that calls share."""

    buffer: DeviceBuffer
    params: BwdParams
    num_splits: int
    scratch_at: tuple[int, int, int, int]
    """Where the parts of a call's scratch memory begin, in bytes: stats, partial sums, semaphores,
    and the fp32 sum of dq where that is not an output."""


def cuda_backward(
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
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See AttnBackend.backward; q, k and v are checked by the caller.

    Returns:
        dq [T, H, D] (``dq_acc`` itself if given), dk and dv [S, G, D] (``dkv`` itself if given)
        in ``grad_dtype``.

    Raises:
        TypeError, ValueError: gradients, lse or delta that do not fit q.
        CudaKernelError: a launch failed.
    """
    check_gradients(dout_THD, q_THD, lse_TH, delta_TH, out, dq_acc, grad_dtype)
    dtype = grad_dtype or torch.float32
    dk, dv = dkv or (empty_as(k_SGD, dtype), empty_as(v_SGD, dtype))
    for name, grad, x in (("dk", dk, k_SGD), ("dv", dv, v_SGD)) if dkv else ():
        _check_target(name, grad, x, dtype)
    dq = empty_as(q_THD, dtype) if dq_acc is None else dq_acc
    if q_THD.shape[0] == 0 or k_SGD.shape[0] == 0:
        return dq.zero_() if dq_acc is None else dq_acc, dk.zero_(), dv.zero_()
    device = q_THD.device
    key = HeadsKey(q_THD.shape[1], k_SGD.shape[1], q_THD.shape[2], device.index)
    work = bwd_work(table, key, deterministic)
    inputs = (q_THD, k_SGD, v_SGD, dout_THD)
    with on_device(device):
        _launch(
            work, inputs, (dq, dk, dv), lse_TH, delta_TH, out, softmax_scale,
            clear_dq=dq_acc is None,
        )  # fmt: skip
    return dq, dk, dv


def has_cuda_row_delta(out_THD: Tensor, dout_THD: Tensor) -> bool:
    """Whether ``cuda_row_delta`` takes these; never builds the library for it.

    Not while tracing: fake tensors have no memory, and the compiler fuses the plain form anyway.
    """
    return (
        loaded_cuda_library(out_THD.device) is not None
        and not must_dispatch(out_THD, dout_THD)
        and out_THD.dtype in (torch.bfloat16, torch.float16)
        and dout_THD.dtype == out_THD.dtype
        and out_THD.shape[-1] in (64, 128)
        and out_THD.numel() > 0
    )


def cuda_row_delta(out_THD: Tensor, dout_THD: Tensor) -> Tensor:
    """fp32 [T, H] sum over D of out * dout in one pass (PyTorch makes two fp32 copies first)."""
    out, dout = aligned(out_THD), aligned(dout_THD)
    delta = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    params = DeltaParams(
        TensorView.of(out),
        TensorView.of(dout),
        delta.data_ptr(),
        stream_handle(out.device),
        *out.shape,
        DTYPE_CODES[out.dtype],
    )
    with on_device(out.device):
        _library().call("magi_row_delta", params)
    return delta


def check_gradients(
    dout: Tensor,
    q: Tensor,
    lse: Tensor,
    delta: Tensor | None,
    out: Tensor | None,
    dq_acc: Tensor | None,
    grad_dtype: torch.dtype | None,
) -> None:
    """What the backward demands beyond the inputs of the forward."""
    if grad_dtype not in (None, torch.float32, q.dtype):
        raise TypeError(
            f"grad_dtype must be {q.dtype} or torch.float32, got {grad_dtype}; cast the gradients"
        )
    if (delta is None) == (out is None):
        raise ValueError("either delta or out is required, got none or both; pass one of them")
    for name, x in (("dout", dout), ("out", out)):
        if x is not None and (x.dtype != q.dtype or x.shape != q.shape):
            raise TypeError(
                f"{name} must have q's dtype and shape, {q.dtype} {list(q.shape)}, got {x.dtype} "
                f"{list(x.shape)}; cast it"
            )
    for name, x in (("lse", lse), ("delta", delta)):
        if x is None:
            continue
        if x.dtype != torch.float32 or x.shape != q.shape[:2]:
            raise TypeError(
                f"{name} must be fp32 {list(q.shape[:2])}, got {x.dtype} {list(x.shape)}; pass "
                f"what the forward returned"
            )
    if dq_acc is None:
        return
    steps = dq_acc.stride(0) % 4 or dq_acc.stride(1) % 4 or dq_acc.data_ptr() % 16
    if dq_acc.dtype != torch.float32 or dq_acc.shape != q.shape or dq_acc.stride(2) != 1 or steps:
        raise ValueError(
            f"dq_acc must be fp32 {list(q.shape)} with 16-byte aligned rows, got {dq_acc.dtype} "
            f"{list(dq_acc.shape)} with strides {list(dq_acc.stride())}; allocate it with "
            f"torch.zeros"
        )


def _check_target(name: str, grad: Tensor, x: Tensor, dtype: torch.dtype) -> None:
    fits = grad.dtype == dtype and grad.shape == x.shape and grad.stride(2) == 1
    step = 16 // grad.element_size()
    if not fits or grad.data_ptr() % 16 or grad.stride(0) % step or grad.stride(1) % step:
        raise ValueError(
            f"{name} must be written to {dtype} {list(x.shape)} with 16-byte aligned rows, got "
            f"{grad.dtype} {list(grad.shape)} with strides {list(grad.stride())}; leave dkv out"
        )


def _launch(
    work: BwdWork,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    lse_TH: Tensor,
    delta_TH: Tensor | None,
    out: Tensor | None,
    softmax_scale: float,
    *,
    clear_dq: bool,
) -> None:
    """One pass on the current stream; no synchronisation."""
    (q, k, v, dout), (dq, dk, dv) = map(aligned, inputs), grads  # held until the launch
    stream = stream_handle(q.device)
    work.buffer.use_on(stream)
    p = BwdParams.from_buffer_copy(work.params)
    p.q, p.k, p.v, p.dout, p.dk, p.dv = map(TensorView.of, (q, k, v, dout, dk, dv))
    p.lse = lse_TH.data_ptr()
    p.lse_stride_token, p.lse_stride_head = lse_TH.stride()
    if out is not None:
        out = aligned(out)
        p.out = TensorView.of(out)
    elif delta_TH is not None:
        p.delta = delta_TH.data_ptr()
        p.delta_stride_token, p.delta_stride_head = delta_TH.stride()
    in_fp32 = dq.dtype == torch.float32
    floats = work.scratch_at[3] // 4 + (0 if in_fp32 else q.numel())
    scratch = torch.empty(floats, dtype=torch.float32, device=q.device)
    p.stats, p.partial, p.semaphores, dq_acc = map(scratch.data_ptr().__add__, work.scratch_at)
    if in_fp32:
        p.dq_acc = TensorView.of(dq)
    else:
        p.dq_acc = TensorView(dq_acc, q.shape[1] * q.shape[2], q.shape[2])
        p.dq = TensorView.of(dq)
    p.stream = stream
    p.dtype = DTYPE_CODES[q.dtype]
    p.grad_dtype = DTYPE_CODES[dk.dtype]
    p.clear_dq = clear_dq
    p.softmax_scale = softmax_scale
    _library().call("magi_flex_attn_bwd", p)


def _scratch_at(p: BwdParams) -> tuple[int, int, int, int]:
    """See BwdWork; sizes as in csrc/flex_attn/bwd/bwd_params.h."""
    stats = 32 * p.num_heads_q * ((p.num_q + 65) // 2 * 2)
    partial = 8 * p.num_splits * p.num_k * p.num_heads_kv * p.head_dim if p.num_splits > 1 else 0
    semaphores = 4 * (1 + 2 * p.num_heads_q * p.num_cells) if p.deterministic else 0
    sizes = [-(-size // 128) * 128 for size in (stats, partial, semaphores)]
    return 0, sizes[0], sum(sizes[:2]), sum(sizes)


@functools.lru_cache(maxsize=1)
def _library() -> CudaLibrary:
    library = cuda_library()
    want = ctypes.sizeof(BwdParams), ctypes.sizeof(DeltaParams)
    got = tuple(library.function(f"magi_{x}_params_bytes")() for x in ("bwd", "delta"))
    if got != want:
        raise CudaKernelError(
            f"the CUDA library must take {want} bytes of backward and delta parameters, got {got}; "
            f"rebuild with python -m megatron_magi.build --force"
        )
    return library


def bwd_work(table: SliceTable, key: HeadsKey, deterministic: bool) -> BwdWork:
    """The backward's work list of this table, built and uploaded when first asked for."""
    cached = table.cache.get(("bwd", key, deterministic))
    if cached is None:
        num_sms = torch.cuda.get_device_properties(key.device_index).multi_processor_count
        cached = table.cache[("bwd", key, deterministic)] = _make(
            table, key, deterministic, num_sms
        )
    return cached


def _make(table: SliceTable, key: HeadsKey, deterministic: bool, num_sms: int) -> BwdWork:
    work = solver.bwd_work_list(
        table.slices, table.num_q, table.num_k, key.heads_q, key.heads_kv, key.head_dim, num_sms,
        deterministic=deterministic,
    )  # fmt: skip
    parts = [work.items, work.entries, work.visits]
    offsets = np.cumsum([0] + [-(-p.size // 32) * 32 for p in parts])  # 128-byte aligned
    host = np.zeros(max(int(offsets[-1]), 1), dtype=np.int32)
    for part, offset in zip(parts, offsets[:-1], strict=True):
        host[offset : offset + part.size] = part.ravel()
    device = torch.device("cuda", key.device_index)
    buffer = DeviceBuffer.upload(torch.from_numpy(host), device)
    base = buffer.data.data_ptr()
    params = BwdParams(
        items=base,
        entries=base + 4 * int(offsets[1]),
        visits=base + 4 * int(offsets[2]),
        num_q=table.num_q,
        num_k=table.num_k,
        num_heads_q=key.heads_q,
        num_heads_kv=key.heads_kv,
        head_dim=key.head_dim,
        num_items=len(work.items),
        num_splits=work.num_splits,
        heads_per_section=work.heads_per_section,
        deterministic=deterministic,
        num_cells=work.num_cells,
        heads_inner=work.heads_inner,
        descending=work.descending,
    )
    return BwdWork(buffer, params, work.num_splits, _scratch_at(params))
