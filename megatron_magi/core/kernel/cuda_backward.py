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

from megatron_magi.core.kernel.cuda_forward import aligned, on_device
from megatron_magi.core.kernel.cuda_library import (
    DTYPE_CODES,
    CudaKernelError,
    CudaLibrary,
    TensorView,
    cuda_library,
)
from megatron_magi.core.kernel.cuda_work import DeviceBuffer, HeadsKey
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.native import solver


class BwdParams(ctypes.Structure):
    """MagiBwdParams of csrc/flex_attn/bwd/bwd_params.h."""

    _fields_ = [
        *(
            (name, TensorView)
            for name in ("q", "k", "v", "dout", "dq_acc", "dq", "dk", "dv")
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
    steps: int
    num_splits: int


def cuda_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    lse_TH: Tensor,
    delta_TH: Tensor,
    table: SliceTable,
    softmax_scale: float,
    *,
    dq_acc: Tensor | None = None,
    grad_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See AttnBackend.backward; q, k and v are checked by the caller.

    Returns:
        dq [T, H, D] (``dq_acc`` itself if given), dk and dv [S, G, D] in ``grad_dtype``.

    Raises:
        TypeError, ValueError: gradients, lse or delta that do not fit q.
        CudaKernelError: a launch failed.
    """
    check_gradients(dout_THD, q_THD, lse_TH, delta_TH, dq_acc, grad_dtype)
    device, dtype = q_THD.device, grad_dtype or torch.float32
    nothing = q_THD.shape[0] == 0 or k_SGD.shape[0] == 0
    make = functools.partial(torch.zeros if nothing else torch.empty, device=device)
    dk, dv = make(k_SGD.shape, dtype=dtype), make(v_SGD.shape, dtype=dtype)
    acc = make(q_THD.shape, dtype=torch.float32) if dq_acc is None else dq_acc
    dq = make(q_THD.shape, dtype=dtype) if dq_acc is None and dtype != acc.dtype else acc
    if nothing:
        return dq, dk, dv
    key = HeadsKey(q_THD.shape[1], k_SGD.shape[1], q_THD.shape[2], device.index)
    work = bwd_work(table, key, deterministic)
    inputs, grads = (q_THD, k_SGD, v_SGD, dout_THD), (acc, dq, dk, dv)
    with on_device(device):
        _launch(work, inputs, grads, lse_TH, delta_TH, softmax_scale, clear_dq=dq_acc is None)
    return dq, dk, dv


def has_cuda_row_delta(out_THD: Tensor, dout_THD: Tensor) -> bool:
    """Whether ``cuda_row_delta`` takes these; never builds the library for it.

    Not while tracing: fake tensors have no memory, and the compiler fuses the plain form anyway.
    """
    return (
        type(out_THD) is Tensor
        and type(dout_THD) is Tensor
        and cuda_library.cache_info().currsize > 0
        and out_THD.is_cuda
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
        torch.cuda.current_stream(out.device).cuda_stream,
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
    delta: Tensor,
    dq_acc: Tensor | None,
    grad_dtype: torch.dtype | None,
) -> None:
    """What the backward demands beyond the inputs of the forward."""
    if grad_dtype not in (None, torch.float32, q.dtype):
        raise TypeError(
            f"grad_dtype must be {q.dtype} or torch.float32, got {grad_dtype}; cast the gradients"
        )
    if dout.dtype != q.dtype or dout.shape != q.shape:
        raise TypeError(
            f"dout must have q's dtype and shape, {q.dtype} {list(q.shape)}, got {dout.dtype} "
            f"{list(dout.shape)}; cast it"
        )
    for name, x in (("lse", lse), ("delta", delta)):
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


def _launch(
    work: BwdWork,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor, Tensor],
    lse_TH: Tensor,
    delta_TH: Tensor,
    softmax_scale: float,
    *,
    clear_dq: bool,
) -> None:
    """One launch on the current stream; no synchronisation. Gradients: fp32 sum of dq, dq (the same
    tensor where it is wanted in fp32), dk, dv."""
    device, (acc, dq, dk, dv) = inputs[0].device, grads
    stream = torch.cuda.current_stream(device)
    work.buffer.use_on(stream)
    p = BwdParams.from_buffer_copy(work.params)
    held = [aligned(x) for x in inputs]  # until the launch
    p.q, p.k, p.v, p.dout = map(TensorView.of, held)
    p.dq_acc, p.dk, p.dv = map(TensorView.of, (acc, dk, dv))
    if dq is not acc:
        p.dq = TensorView.of(dq)
    p.lse, p.delta = lse_TH.data_ptr(), delta_TH.data_ptr()
    p.lse_stride_token, p.lse_stride_head = lse_TH.stride()
    p.delta_stride_token, p.delta_stride_head = delta_TH.stride()
    stats = torch.empty(8 * p.num_heads_q * stat_rows(p.num_q), dtype=torch.float32, device=device)
    p.stats = stats.data_ptr()
    if p.num_splits > 1:
        partial = torch.empty(2 * p.num_splits * dk.numel(), dtype=torch.float32, device=device)
        p.partial = partial.data_ptr()
    if p.deterministic:
        cells = 1 + 2 * p.num_heads_q * p.num_cells
        semaphores = torch.empty(cells, dtype=torch.int32, device=device)
        p.semaphores = semaphores.data_ptr()
    p.stream = stream.cuda_stream
    p.dtype = DTYPE_CODES[inputs[0].dtype]
    p.grad_dtype = DTYPE_CODES[dk.dtype]
    p.clear_dq = clear_dq
    p.softmax_scale = softmax_scale
    _library().call("magi_flex_attn_bwd", p)


def stat_rows(num_q: int) -> int:
    """Rows of the stats workspace: bwd_stat_rows of csrc/flex_attn/bwd/bwd_args.h."""
    return (num_q + 65) // 2 * 2


@functools.lru_cache(maxsize=1)
def _library() -> CudaLibrary:
    library = cuda_library()
    size = library.function("magi_bwd_params_bytes")()
    if size != ctypes.sizeof(BwdParams):
        raise CudaKernelError(
            f"the CUDA library must take {ctypes.sizeof(BwdParams)} bytes of backward parameters, "
            f"got {size}; rebuild with python -m megatron_magi.build --force"
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
    parts = [work["items"], work["entries"], work["visits"]]
    offsets = np.cumsum([0] + [-(-p.size // 32) * 32 for p in parts])  # 128-byte aligned
    host = np.zeros(max(int(offsets[-1]), 1), dtype=np.int32)
    for part, offset in zip(parts, offsets[:-1], strict=True):
        host[offset : offset + part.size] = part.ravel()
    buffer = DeviceBuffer.upload(host, torch.device("cuda", key.device_index))
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
        num_items=len(work["items"]),
        num_splits=work["num_splits"],
        heads_per_section=work["heads_per_section"],
        deterministic=deterministic,
        num_cells=work["num_cells"],
        heads_inner=work["heads_inner"],
        descending=work["descending"],
    )
    return BwdWork(buffer, params, work["steps"], work["num_splits"])
