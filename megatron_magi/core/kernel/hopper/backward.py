"""The backward on Hopper: the choice, its gradients and scratch memory, one launch
(csrc/attention/backward).

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim, E width of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.core.cuda.abi import (
    DTYPE_CODES,
    BwdParams,
    DeltaParams,
    ReceivedKeys,
    TensorView,
)
from megatron_magi.core.cuda.library import cuda_library, on_device, stream_handle
from megatron_magi.core.kernel.autograd import must_dispatch
from megatron_magi.core.kernel.backend import (
    AttnCall,
    GradCall,
    Pair,
    Received,
    refuse_received,
    row_delta,
)
from megatron_magi.core.kernel.hopper.checks import (
    DTYPES,
    check_call,
    check_gradients,
    widths_for,
)
from megatron_magi.core.kernel.hopper.choice import backward_launch
from megatron_magi.core.kernel.hopper.launch import (
    BwdLaunch,
    Gradients,
    HeadsKey,
    aligned,
    empty_as,
)
from megatron_magi.core.kernel.hopper.padding import (
    deliver_gradients,
    padded_call,
    padded_grad,
)
from megatron_magi.core.kernel.widths import COMPILED_WIDTHS, widths_of
from megatron_magi.core.plan.travel import NO_TRAVEL

VALUE_DIMS = {widths.value_dim for widths in COMPILED_WIDTHS}


def backward(call: AttnCall, grad: GradCall) -> Gradients:
    """See AttnBackend.backward.

    Returns:
        dq [T, H, D] (``grad.dq`` itself if given), dk [S, G, D] and dv [S, G, E] (``grad.dkv``
        itself if given); those of received keys are in ``grad.received_dkv``.

    Raises:
        TypeError, ValueError, NotImplementedError: a call that the kernels do not take.
        CudaKernelError: a launch failed.
    """
    widths = widths_for(call)
    if widths != widths_of(call.q, call.v):
        refuse_received(call, f"a backward on heads that are padded to {tuple(widths)}")
        wide = padded_call(call, widths)
        return deliver_gradients(backward(wide, padded_grad(grad, wide)), call, grad)
    check_call(call)
    grad = _in_one_dtype(grad, call.q.dtype)
    check_gradients(call, grad)
    q, k, v = call[:3]
    dtype = grad.dtype or torch.float32
    dk, dv = grad.dkv or (empty_as(k, dtype), empty_as(v, dtype))
    dq = empty_as(q, dtype) if grad.dq is None else grad.dq
    if call.table.num_q == 0 or call.table.num_k == 0:
        for unseen in (dk, dv, *(grad.received_dkv or ())):
            unseen.zero_()
        return dq.zero_() if grad.dq is None else dq, dk, dv
    launch = _launch_of(call, grad.deterministic)
    launch_backward(launch, call, grad, (dq, dk, dv))
    return dq, dk, dv


def done_count(call: AttnCall, deterministic: bool) -> int:
    """See AttnBackend.done_count."""
    return _launch_of(call, deterministic).done_count


def _launch_of(call: AttnCall, deterministic: bool) -> BwdLaunch:
    key, received = HeadsKey.of(call), call.received
    travel = NO_TRAVEL if received is None else received.travel
    return backward_launch(call.table, key, deterministic, call.k.shape[0], travel)


def _in_one_dtype(grad: GradCall, dtype: torch.dtype) -> GradCall:
    """The gradients with dout in q's dtype. If ``out`` or dout has another dtype, delta replaces
    ``out``, because the kernel would compute delta from rounded values."""
    out, dout = grad.out, grad.dout
    if out is not None and not out.dtype == dout.dtype == dtype:
        grad = grad._replace(delta=delta(out, dout, grad.lse.dtype), out=None)
    return grad if dout.dtype == dtype else grad._replace(dout=dout.to(dtype))


def launch_backward(launch: BwdLaunch, call: AttnCall, grad: GradCall, results: Gradients) -> None:
    """One pass on the current stream; no synchronisation."""
    inputs = (*call[:3], grad.dout)
    (q, k, v, dout), (dq, dk, dv) = map(aligned, inputs), results  # held until the launch
    stream = stream_handle(q.device)
    launch.tables.use_on(stream)
    p = BwdParams.from_buffer_copy(launch.params)
    p.q, p.k, p.v, p.dout, p.dk, p.dv = map(TensorView.of, (q, k, v, dout, dk, dv))
    p.lse = grad.lse.data_ptr()
    p.lse_stride_token, p.lse_stride_head = grad.lse.stride()
    if grad.out is not None:
        out = aligned(grad.out)
        p.out = TensorView.of(out)
    elif grad.delta is not None:
        p.delta = grad.delta.data_ptr()
        p.delta_stride_token, p.delta_stride_head = grad.delta.stride()
    in_fp32 = dq.dtype == torch.float32
    floats = launch.scratch_at[3] // 4 + (0 if in_fp32 else q.numel())
    scratch = torch.empty(floats, dtype=torch.float32, device=q.device)
    p.stats, p.partial, p.semaphores, dq_sum = map(scratch.data_ptr().__add__, launch.scratch_at)
    if in_fp32:
        p.dq_acc = TensorView.of(dq)
    else:
        p.dq_acc = TensorView(dq_sum, q.shape[1] * q.shape[2], q.shape[2])
        p.dq = TensorView.of(dq)
    if call.received is not None and grad.received_dkv is not None:
        p.received = _received_keys(call.received, grad.received_dkv, grad.done)
    p.stream = stream
    p.dtype = DTYPE_CODES[q.dtype]
    p.grad_dtype = DTYPE_CODES[dk.dtype]
    p.clear_dq = grad.dq is None
    p.softmax_scale = call.softmax_scale
    p.softcap = call.softcap
    with on_device(q.device):
        cuda_library().call("magi_attn_bwd", p)


def _received_keys(received: Received, dkv: Pair, done: int | None) -> ReceivedKeys:
    views = map(TensorView.of, (received.k, received.v, *dkv))
    arrival = received.arrival
    word, number = (None, 0) if arrival is None else arrival
    return ReceivedKeys(*views, word, done, number % 2**32, DTYPE_CODES[dkv[0].dtype])


def delta(out: Tensor, dout: Tensor, dtype: torch.dtype) -> Tensor:
    """See AttnBackend.delta: one kernel where it takes these tensors, PyTorch elsewhere.

    PyTorch first creates two fp32 copies, but fake tensors have no memory for the kernel, and
    torch.compile fuses the plain form.
    """
    fits = (
        dtype == torch.float32
        and out.dtype in DTYPES
        and dout.dtype == out.dtype
        and out.shape[-1] in VALUE_DIMS
        and out.numel() > 0
        and not must_dispatch(out, dout)
    )
    return kernel_delta(out, dout) if fits else row_delta(out, dout, dtype)


def kernel_delta(out_THD: Tensor, dout_THD: Tensor) -> Tensor:
    """delta as fp32 [T, H], by one launch on the current stream."""
    out, dout = aligned(out_THD), aligned(dout_THD)
    made = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    params = DeltaParams(
        TensorView.of(out),
        TensorView.of(dout),
        made.data_ptr(),
        stream_handle(out.device),
        *out.shape,
        DTYPE_CODES[out.dtype],
    )
    with on_device(out.device):
        cuda_library().call("magi_row_delta", params)
    return made
