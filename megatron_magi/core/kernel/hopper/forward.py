"""The forward on Hopper: the choice, its outputs, one launch (csrc/attention/forward).

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim, E width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_magi.core.cuda.abi import DTYPE_CODES, FwdParams, ParamTemplate, TensorView
from megatron_magi.core.cuda.library import cuda_library, on_device, stream_handle
from megatron_magi.core.cuda.tables import DeviceBuffer
from megatron_magi.core.kernel.backend import (
    AttnCall,
    OutLse,
    PreparedForward,
    scatter_rows_,
)
from megatron_magi.core.kernel.call_key import call_key, key_of, key_of_pair
from megatron_magi.core.kernel.head_dims import HeadDims, widths_of
from megatron_magi.core.kernel.hopper.call_checks import check_call, check_output, widths_for
from megatron_magi.core.kernel.hopper.choice import chosen_forward
from megatron_magi.core.kernel.hopper.launch_values import (
    ChosenForward,
    HeadsKey,
    aligned,
    has_aligned_rows,
    new_of,
    out_shape,
    tile_counter,
)
from megatron_magi.core.kernel.hopper.padding import deliver_output, padded_call, padded_dtype
from megatron_magi.core.kernel.merge import merge_
from megatron_magi.core.kernel.sink import check_joins

PATCHED_FIELDS = (
    "q.data", "k.data", "v.data", "out.data", "lse", "sink_lse", "max_logits", "counter", "stream",
)  # fmt: skip
"""The fields of FwdParams in which calls of one key differ."""


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
    return _prepared(call, prev, into, out_dtype)(call, prev, into)


def prepared_forward(call: AttnCall, out_dtype: torch.dtype) -> PreparedForward:
    """See AttnBackend.prepared_forward."""
    return _prepared(call, None, None, out_dtype)


def _prepared(
    call: AttnCall, prev: OutLse | None, into: OutLse | None, out_dtype: torch.dtype | None
) -> Callable[..., OutLse]:
    """Computes calls of a key, as a function of the call, ``prev`` and ``into``. It is kept
    in the table of the slices, so that the checks and the choice are those of the first call."""
    q, k, v, table, scale, _, softcap, sinks = call
    key = (
        call_key(q, k, v), scale, softcap, out_dtype,
        None if sinks is None else key_of(sinks),
        None if prev is None else key_of_pair(prev), None if into is None else key_of_pair(into),
    )  # fmt: skip
    found: Callable[..., OutLse] | None = table.calls.get(key)
    if found is None:
        found = _prepare(call, prev, into, out_dtype)
        table.calls.keep(key, found)
    return found


def _prepare(
    call: AttnCall, prev: OutLse | None, into: OutLse | None, out_dtype: torch.dtype | None
) -> Callable[..., OutLse]:
    check_joins(call, prev)
    widths = widths_for(call)
    if widths != widths_of(call.q, call.v):
        return partial(_on_wider_heads, widths, out_dtype)
    check_call(call)
    check_output(call, prev, into, out_dtype)
    gaps = call.sink_lse is not None and call.sink_lse.stride(-1) != 1
    if gaps or not all(map(has_aligned_rows, call[:3])):
        return partial(_on_copies, out_dtype)
    chosen = chosen_forward(call.table, HeadsKey.of(call))
    if chosen.num_parts > 1:
        return partial(_in_parts, chosen, out_dtype)
    given = into if prev is None else prev
    how = {"merge": prev is not None, "fill_empty_rows": given is None}
    return _prepared_launch(chosen, call, given, out_dtype, **how)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: what computes most calls of a key."""

    device: torch.device
    tables: DeviceBuffer
    run: Callable[..., None]
    """Its arguments are the fields of PATCHED_FIELDS."""
    new_result: tuple[Callable[[], Tensor], Callable[[], Tensor]]
    """They make out and lse."""
    out_dtype: torch.dtype | None

    def __call__(
        self, call: AttnCall, prev: OutLse | None = None, into: OutLse | None = None
    ) -> OutLse:
        q, k, v = call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr()
        if (q | k | v) % 16:
            return _on_copies(self.out_dtype, call, prev, into)
        result = into if prev is None else prev
        if result is None:
            new_out, new_lse = self.new_result
            result = new_out(), new_lse()
        out, lse, sinks, most = *result, call.sink_lse, call.max_logits
        stream = stream_handle(self.device)
        captured = self.tables.use_on(stream)
        counter = tile_counter(self.device, stream, captured)  # held until the launch
        with on_device(self.device):
            self.run(
                q, k, v, out.data_ptr(), lse.data_ptr(),
                0 if sinks is None else sinks.data_ptr(), 0 if most is None else most.data_ptr(),
                counter.data_ptr(), stream,
            )  # fmt: skip
        return result


def _on_copies(
    out_dtype: torch.dtype | None, call: AttnCall, prev: OutLse | None = None,
    into: OutLse | None = None,
) -> OutLse:  # fmt: skip
    """The same call on copies of those tensors that a kernel cannot read."""
    return forward(_readable(call), prev=prev, into=into, out_dtype=out_dtype)


def _on_wider_heads(
    widths: HeadDims, out_dtype: torch.dtype | None, call: AttnCall, prev: OutLse | None = None,
    into: OutLse | None = None,
) -> OutLse:  # fmt: skip
    """The same call on heads that a kernel has."""
    wide = padded_call(call, widths)
    made = forward(wide, out_dtype=padded_dtype(prev, into, out_dtype))
    return deliver_output(made, call, prev, into)


def _in_parts(
    chosen: ChosenForward, out_dtype: torch.dtype | None, call: AttnCall,
    prev: OutLse | None = None, into: OutLse | None = None,
) -> OutLse:  # fmt: skip
    """For few tiles with many keys each: compute parts of the keys in parallel, and merge the parts
    in a fixed order. Sinks have joined the first part (csrc/attention/params.h)."""
    q = call.q
    shape = (chosen.num_parts, *out_shape(call))
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
    launch_forward(chosen, call, (out.flatten(0, 1), lse.flatten(0, 1)))
    for part in range(1, chosen.num_parts):
        merge_(out[0], lse[0], out[part], lse[part])
    if prev is not None:
        merge_(*prev, out[0], lse[0])
        return prev
    if into is not None:
        return scatter_rows_((out[0].to(into[0].dtype), lse[0]), call.table, into)
    return out[0].to(out_dtype or q.dtype, copy=True), lse[0].clone()


def launch_forward(
    chosen: ChosenForward, call: AttnCall, result: OutLse, *, merge: bool = False
) -> None:
    """One launch on the current stream; no synchronisation. It also writes 0, and -inf or the
    sinks' lse, to rows that no slice covers.

    Args:
        result: out [T, H, E] and lse [T, H], or as many of them as there are parts.
        merge: merge into what ``result`` holds.
    """
    call = _readable(call)
    _prepared_launch(chosen, call, result, merge=merge)(call, into=result)


def _readable(call: AttnCall) -> AttnCall:
    """The call itself, or one on copies of those tensors that a kernel cannot read."""
    q, k, v = map(aligned, call[:3])
    sinks = call.sink_lse
    if sinks is not None and sinks.stride(-1) != 1:
        sinks = sinks.contiguous()
    same = q is call.q and k is call.k and v is call.v and sinks is call.sink_lse
    return call if same else call._replace(q=q, k=k, v=v, sink_lse=sinks)


def _prepared_launch(
    chosen: ChosenForward, call: AttnCall, given: OutLse | None,
    out_dtype: torch.dtype | None = None, *, merge: bool, fill_empty_rows: bool = True,
) -> Launch:  # fmt: skip
    """The launch of calls of this one's key; ``given``: what it writes, None: new tensors."""
    q = call.q
    new_out = new_of(out_shape(call), out_dtype or q.dtype, q.device)
    new_lse = new_of(tuple(q.shape[:2]), torch.float32, q.device)
    result = (new_out(), new_lse()) if given is None else given
    p = FwdParams.from_buffer_copy(chosen.params)
    p.q, p.k, p.v, p.out = map(TensorView.of, (*call[:3], result[0]))
    p.lse_stride_token, p.lse_stride_head = result[1].stride()
    if call.sink_lse is not None and call.sink_lse.ndim > 1:
        p.sink_stride_token = call.sink_lse.stride(0)
    p.dtype = DTYPE_CODES[q.dtype]
    p.out_dtype = DTYPE_CODES[result[0].dtype]
    p.merge = merge
    if not fill_empty_rows:
        p.num_empty_ranges = 0
    p.softmax_scale = call.softmax_scale
    p.softcap = call.softcap
    run = cuda_library().prepared("magi_attn_fwd", ParamTemplate(p, PATCHED_FIELDS))
    return Launch(q.device, chosen.tables, run, (new_out, new_lse), out_dtype)
