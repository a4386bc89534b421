"""The forward on Hopper: fills in one params struct and launches (csrc/flex_attn/fwd)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.core.cuda_library import (
    DTYPE_CODES,
    FwdParams,
    TensorView,
    cuda_library,
    on_device,
    stream_handle,
)
from megatron_magi.core.kernel.backend import OutLse, put_rows
from megatron_magi.core.kernel.cuda_work import FwdWork, HeadsKey, fwd_work, tile_counter
from megatron_magi.core.kernel.merge import merge_
from megatron_magi.core.kernel.slice_table import SliceTable


def cuda_forward(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    table: SliceTable,
    softmax_scale: float,
    prev: OutLse | None,
    into: OutLse | None,
    out_dtype: torch.dtype | None,
) -> OutLse:
    """See AttnBackend.forward; inputs are checked by the caller."""
    device = q_THD.device
    key = HeadsKey(q_THD.shape[1], k_SGD.shape[1], q_THD.shape[2], device.index)
    work = fwd_work(table, key)
    if work.num_parts > 1:
        dtype = out_dtype if into is None else into[0].dtype
        made = _forward_in_parts(work, q_THD, k_SGD, v_SGD, softmax_scale, prev, dtype)
        return made if into is None else put_rows(made, table, into)
    given = into if prev is None else prev
    if given is None:
        out = empty_as(q_THD, out_dtype or q_THD.dtype)
        lse = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=device)
    else:
        out, lse = given
    launch_forward(
        work, q_THD, k_SGD, v_SGD, out, lse, softmax_scale, prev is not None,
        fill_empty_rows=given is None,
    )  # fmt: skip
    return out, lse


def _forward_in_parts(
    work: FwdWork,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    softmax_scale: float,
    prev: OutLse | None,
    out_dtype: torch.dtype | None,
) -> OutLse:
    """Few tiles with long key walks: parts of the keys side by side, then merged in fixed order."""
    shape = (work.num_parts, *q_THD.shape)
    out = torch.empty(shape, dtype=torch.float32, device=q_THD.device)
    lse = torch.empty(shape[:3], dtype=torch.float32, device=q_THD.device)
    flat = out.flatten(0, 1), lse.flatten(0, 1)
    launch_forward(work, q_THD, k_SGD, v_SGD, *flat, softmax_scale, merge=False)
    for part in range(1, work.num_parts):
        merge_(out[0], lse[0], out[part], lse[part])
    if prev is not None:
        merge_(*prev, out[0], lse[0])
        return prev
    return out[0].to(out_dtype or q_THD.dtype, copy=True), lse[0].clone()


def launch_forward(
    work: FwdWork,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    softmax_scale: float,
    merge: bool,
    *,
    fill_empty_rows: bool = True,
) -> None:
    """One launch on the current stream; no synchronisation."""
    device = q_THD.device
    stream = stream_handle(device)
    work.buffer.use_on(stream)
    p = FwdParams.from_buffer_copy(work.params)
    q, k, v = aligned(q_THD), aligned(k_SGD), aligned(v_SGD)  # held until the launch
    p.q, p.k, p.v, p.out = map(TensorView.of, (q, k, v, out_THD))
    p.lse = lse_TH.data_ptr()
    p.lse_stride_token, p.lse_stride_head = lse_TH.stride()
    p.counter = tile_counter(device, stream).data_ptr()
    p.stream = stream
    p.dtype = DTYPE_CODES[q_THD.dtype]
    p.out_dtype = DTYPE_CODES[out_THD.dtype]
    p.merge = merge
    if not fill_empty_rows:
        p.num_empty_ranges = 0
    p.softmax_scale = softmax_scale
    with on_device(device):
        cuda_library().call("magi_flex_attn_fwd", p)


def empty_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, of the shape of ``x``; half the host time of torch.empty."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def aligned(x: Tensor) -> Tensor:
    """``x``, copied only if the copy engine cannot read it (16-byte base and strides)."""
    token, head, column = x.stride()
    step = 16 // x.element_size()
    fits = token % step == 0 and head % step == 0 and x.data_ptr() % 16 == 0
    fits = fits and token > 0 and head > 0 and column == 1
    return x if fits else x.clone(memory_format=torch.contiguous_format)
