"""The forward on Hopper: the choice, its outputs, one launch (csrc/attention/forward).

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim, E width of values.
"""

from __future__ import annotations

import torch

from megatron_magi.core.cuda.abi import DTYPE_CODES, FwdParams, TensorView
from megatron_magi.core.cuda.library import cuda_library, on_device, stream_handle
from megatron_magi.core.kernel.backend import AttnCall, OutLse, put_rows, refuse_received
from megatron_magi.core.kernel.hopper.checks import check_call, check_output, widths_for
from megatron_magi.core.kernel.hopper.choice import forward_launch
from megatron_magi.core.kernel.hopper.launch import (
    FwdLaunch,
    HeadsKey,
    aligned,
    out_shape,
    tile_counter,
)
from megatron_magi.core.kernel.hopper.padding import deliver_output, padded_call, padded_dtype
from megatron_magi.core.kernel.merge import merge_
from megatron_magi.core.kernel.sink import check_joins
from megatron_magi.core.kernel.widths import widths_of


def forward(
    call: AttnCall,
    *,
    prev: OutLse | None = None,
    into: OutLse | None = None,
    out_dtype: torch.dtype | None = None,
) -> OutLse:
    """See AttnBackend.forward.

    Raises:
        TypeError, ValueError, NotImplementedError: a call that the kernels do not take.
        CudaKernelError: a launch failed.
    """
    refuse_received(call, "a forward")
    check_joins(call, prev)
    widths = widths_for(call)
    if widths != widths_of(call.q, call.v):
        made = forward(padded_call(call, widths), out_dtype=padded_dtype(prev, into, out_dtype))
        return deliver_output(made, call, prev, into)
    check_call(call)
    check_output(call, prev, into, out_dtype)
    launch = forward_launch(call.table, HeadsKey.of(call))
    if launch.num_parts > 1:
        dtype = out_dtype if into is None else into[0].dtype
        made = _forward_in_parts(launch, call, prev, dtype)
        return made if into is None else put_rows(made, call.table, into)
    given = into if prev is None else prev
    if given is not None:
        launch_forward(launch, call, given, merge=prev is not None, fill_empty_rows=False)
        return given
    q = call.q
    out = q.new_empty(out_shape(call), dtype=out_dtype or q.dtype)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    launch_forward(launch, call, (out, lse))
    return out, lse


def _forward_in_parts(
    launch: FwdLaunch, call: AttnCall, prev: OutLse | None, out_dtype: torch.dtype | None
) -> OutLse:
    """For few tiles with many keys each: compute parts of the keys in parallel, and merge the parts
    in a fixed order. Sinks have joined the first part (csrc/attention/params.h)."""
    q = call.q
    shape = (launch.num_parts, *out_shape(call))
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
    launch_forward(launch, call, (out.flatten(0, 1), lse.flatten(0, 1)))
    for part in range(1, launch.num_parts):
        merge_(out[0], lse[0], out[part], lse[part])
    if prev is not None:
        merge_(*prev, out[0], lse[0])
        return prev
    return out[0].to(out_dtype or q.dtype, copy=True), lse[0].clone()


def launch_forward(
    launch: FwdLaunch,
    call: AttnCall,
    result: OutLse,
    *,
    merge: bool = False,
    fill_empty_rows: bool = True,
) -> None:
    """One launch on the current stream; no synchronisation.

    Args:
        result: out [T, H, E] and lse [T, H], or as many of them as there are parts.
        merge: merge into what ``result`` holds.
        fill_empty_rows: write 0, and -inf or the sinks' lse, to rows that no slice covers.
    """
    (out, lse), device = result, call.q.device
    stream = stream_handle(device)
    launch.tables.use_on(stream)
    p = FwdParams.from_buffer_copy(launch.params)
    q, k, v = map(aligned, call[:3])  # held until the launch
    p.q, p.k, p.v, p.out = map(TensorView.of, (q, k, v, out))
    p.lse = lse.data_ptr()
    p.lse_stride_token, p.lse_stride_head = lse.stride()
    if call.max_logits is not None:
        p.max_logits = call.max_logits.data_ptr()
    sinks = _give_sinks(p, call.sink_lse)  # held until the launch
    p.counter = tile_counter(device, stream).data_ptr()
    p.stream = stream
    p.dtype = DTYPE_CODES[q.dtype]
    p.out_dtype = DTYPE_CODES[out.dtype]
    p.merge = merge
    if not fill_empty_rows:
        p.num_empty_ranges = 0
    p.softmax_scale = call.softmax_scale
    p.softcap = call.softcap
    with on_device(device):
        cuda_library().call("magi_attn_fwd", p)
    del sinks


def _give_sinks(p: FwdParams, sink_lse: torch.Tensor | None) -> torch.Tensor | None:
    """Pass the sinks to a launch, and return the tensor that must live until then."""
    if sink_lse is None:
        return None
    if sink_lse.stride(-1) != 1:
        sink_lse = sink_lse.contiguous()
    p.sink_lse = sink_lse.data_ptr()
    p.sink_stride_token = 0 if sink_lse.ndim == 1 else sink_lse.stride(0)
    return sink_lse
