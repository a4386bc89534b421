"""The backward on Hopper: the choice, its gradients and scratch memory, one launch
(csrc/attention/backward).

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim, E width of values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.core.cuda.abi import (
    DTYPE_CODES,
    BwdParams,
    DeltaParams,
    Pattern,
    TensorView,
)
from megatron_magi.core.cuda.library import cuda_library, on_device, stream_handle
from megatron_magi.core.kernel.autograd import must_dispatch
from megatron_magi.core.kernel.backend import (
    AttnCall,
    GradCall,
    Gradients,
    RepeatedBackward,
    row_delta,
)
from megatron_magi.core.kernel.form import Forms, form_of, form_of_pair, form_of_qkv
from megatron_magi.core.kernel.hopper.checks import (
    DTYPES,
    check_call,
    check_gradients,
    widths_for,
)
from megatron_magi.core.kernel.hopper.choice import backward_launch
from megatron_magi.core.kernel.hopper.launch import (
    BwdLaunch,
    HeadsKey,
    aligned,
    new_of,
)
from megatron_magi.core.kernel.hopper.padding import (
    deliver_gradients,
    padded_call,
    padded_grad,
)
from megatron_magi.core.kernel.widths import COMPILED_WIDTHS, widths_of

VALUE_DIMS = {widths.value_dim for widths in COMPILED_WIDTHS}


VARYING = (
    *(f"{name}.data" for name in ("q", "k", "v", "dout", "out", "dq_acc", "dq", "dk", "dv")),
    *("lse", "delta", "stats", "partial", "semaphores", "stream"),
)
"""The fields of BwdParams in which calls of one form differ."""


class _Repeat(NamedTuple):
    """What the calls of one form share, once the first of them has passed the checks."""

    device: torch.device
    launch: BwdLaunch
    run: Callable[..., None]
    """A launch; its arguments are the fields of VARYING."""
    new_grads: tuple[Callable[[], Tensor], ...]
    """They make dq, dk and dv."""
    new_scratch: Callable[[], Tensor]
    in_fp32: bool
    """Whether dq is made in fp32."""


def backward(call: AttnCall, grad: GradCall) -> Gradients:
    """See AttnBackend.backward.

    Returns:
        dq [T, H, D] (``grad.dq`` itself if given), dk [S, G, D] and dv [S, G, E] (``grad.dkv``
        itself if given).

    Raises:
        TypeError, ValueError, NotImplementedError: a call that the kernels do not take.
        CudaKernelError: a launch failed.
    """
    repeats = call.table.cache.get("backwards")
    if repeats is None:
        repeats = call.table.cache.setdefault("backwards", Forms())
    form = _form(call, grad)
    repeat: _Repeat | None = repeats.get(form)
    if repeat is not None:
        made = _results(repeat.new_grads, grad)
        if _launch_call(repeat, call, grad, made):
            return made
    made, repeat = _checked_backward(call, grad)
    if repeat is not None:
        repeats.keep(form, repeat)
    return made


def repeated_backward(call: AttnCall, grad: GradCall) -> RepeatedBackward | None:
    """See AttnBackend.repeated_backward."""
    repeat: _Repeat | None = call.table.cache.get("backwards", {}).get(_form(call, grad))
    if repeat is None or grad.out is None:
        return None
    return partial(_backward_again, repeat, _form_of_six(*call[:3], grad.out, grad.lse, grad.dout))


def _backward_again(repeat: _Repeat, form: Hashable, *six: Tensor) -> Gradients | None:
    """See RepeatedBackward."""
    if _form_of_six(*six) != form:
        return None
    new_dq, new_dk, new_dv = repeat.new_grads
    made = new_dq(), new_dk(), new_dv()
    q, k, v, out, lse, dout = six
    places = (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr(), out.data_ptr(),
        made[0].data_ptr(), made[1].data_ptr(), made[2].data_ptr(),
    )  # fmt: skip
    return made if _launch(repeat, places, lse.data_ptr(), 0) else None


def _form_of_six(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> Hashable:
    # Written out like form_of_qkv.
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        out.shape, out.stride(), out.dtype, out.device,
        lse.shape, lse.stride(), lse.dtype, lse.device,
        dout.shape, dout.stride(), dout.dtype, dout.device,
    )  # fmt: skip


def _form(call: AttnCall, grad: GradCall) -> Hashable:
    """See form.py."""
    q, k, v, _, scale, _, softcap, _ = call
    dout, lse, delta, out, dtype, dq, dkv, deterministic = grad
    return (
        form_of_qkv(q, k, v), scale, softcap,
        dout.shape, dout.stride(), dout.dtype, dout.device,
        lse.shape, lse.stride(), lse.dtype, lse.device,
        None if delta is None else form_of(delta), None if out is None else form_of(out), dtype,
        None if dq is None else form_of(dq), None if dkv is None else form_of_pair(dkv),
        deterministic,
    )  # fmt: skip


def _checked_backward(call: AttnCall, grad: GradCall) -> tuple[Gradients, _Repeat | None]:
    """The result, and what further calls of the form repeat: None if it is more than a launch."""
    widths = widths_for(call)
    if widths != widths_of(call.q, call.v):
        wide = padded_call(call, widths)
        return deliver_gradients(backward(wide, padded_grad(grad, wide)), call, grad), None
    check_call(call)
    asked, grad = grad, _in_one_dtype(grad, call.q.dtype)
    check_gradients(call, grad)
    dtype = grad.dtype or torch.float32
    new_grads = tuple(new_of(tuple(x.shape), dtype, x.device) for x in call[:3])
    made = _results(new_grads, grad)
    if call.table.num_q == 0 or call.table.num_k == 0:
        return _without_tokens(made, grad), None
    readable, grads = _readable(call, grad)
    launch = backward_launch(call.table, HeadsKey.of(call), grad.deterministic)
    params = _params(launch, readable, grads, made)
    repeat = _repeat(launch, params, new_grads, made[0])
    launched = _launch_call(repeat, readable, grads, made)
    assert launched, "the checks and the copies leave nothing that a kernel cannot read"
    return made, repeat if readable is call and grads is asked else None


def _results(new_grads: tuple[Callable[[], Tensor], ...], grad: GradCall) -> Gradients:
    """Where the gradients are written: given tensors, or new ones."""
    new_dq, new_dk, new_dv = new_grads
    dq = new_dq() if grad.dq is None else grad.dq
    return (dq, new_dk(), new_dv()) if grad.dkv is None else (dq, *grad.dkv)


def _without_tokens(made: Gradients, grad: GradCall) -> Gradients:
    dq, dk, dv = made
    return dq.zero_() if grad.dq is None else dq, dk.zero_(), dv.zero_()


def _in_one_dtype(grad: GradCall, dtype: torch.dtype) -> GradCall:
    """The gradients with dout in q's dtype. If ``out`` or dout has another dtype, delta replaces
    ``out``, because the kernel would compute delta from rounded values."""
    out, dout = grad.out, grad.dout
    if out is not None and not out.dtype == dout.dtype == dtype:
        grad = grad._replace(delta=delta(out, dout, grad.lse.dtype), out=None)
    return grad if dout.dtype == dtype else grad._replace(dout=dout.to(dtype))


def _readable(call: AttnCall, grad: GradCall) -> tuple[AttnCall, GradCall]:
    """The call itself, or one on copies of those tensors that a kernel cannot read."""
    q, k, v = map(aligned, call[:3])
    dout, out = aligned(grad.dout), None if grad.out is None else aligned(grad.out)
    if not (q is call.q and k is call.k and v is call.v):
        call = call._replace(q=q, k=k, v=v)
    if not (dout is grad.dout and out is grad.out):
        grad = grad._replace(dout=dout, out=out)
    return call, grad


def _params(launch: BwdLaunch, call: AttnCall, grad: GradCall, made: Gradients) -> BwdParams:
    """The parameters of a launch, without the fields in which calls of one form differ."""
    (q, k, v), (dq, dk, dv) = call[:3], made
    p = BwdParams.from_buffer_copy(launch.params)
    p.q, p.k, p.v, p.dout, p.dk, p.dv = map(TensorView.of, (q, k, v, grad.dout, dk, dv))
    p.lse_stride_token, p.lse_stride_head = grad.lse.stride()
    if grad.out is not None:
        p.out = TensorView.of(grad.out)
    elif grad.delta is not None:
        p.delta_stride_token, p.delta_stride_head = grad.delta.stride()
    if dq.dtype == torch.float32:
        p.dq_acc = TensorView.of(dq)
    else:
        p.dq_acc = TensorView(0, q.shape[1] * q.shape[2], q.shape[2])
        p.dq = TensorView.of(dq)
    p.dtype = DTYPE_CODES[q.dtype]
    p.grad_dtype = DTYPE_CODES[dk.dtype]
    p.clear_dq = grad.dq is None
    p.softmax_scale = call.softmax_scale
    p.softcap = call.softcap
    return p


def _repeat(
    launch: BwdLaunch,
    params: BwdParams,
    new_grads: tuple[Callable[[], Tensor], ...],
    dq: Tensor,
) -> _Repeat:
    """``dq``: where it is written."""
    in_fp32 = dq.dtype == torch.float32
    floats = launch.scratch_at[3] // 4 + (0 if in_fp32 else dq.numel())
    new_scratch = new_of((floats,), torch.float32, dq.device)
    run = cuda_library().prepared("magi_attn_bwd", Pattern(params, VARYING))
    return _Repeat(dq.device, launch, run, new_grads, new_scratch, in_fp32)


def _launch_call(repeat: _Repeat, call: AttnCall, grad: GradCall, made: Gradients) -> bool:
    """See _launch."""
    (q, k, v), (dq, dk, dv), (dout, lse, delta, out) = call[:3], made, grad[:4]
    places = (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr(),
        0 if out is None else out.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
    )  # fmt: skip
    return _launch(repeat, places, lse.data_ptr(), 0 if delta is None else delta.data_ptr())


def _launch(repeat: _Repeat, places: tuple[int, ...], lse: int, delta: int) -> bool:
    """One pass on the current stream, without synchronisation. False: nothing was launched, because
    the copy engine reads and writes at multiples of 16 bytes only.

    Args:
        places: the addresses of q, k, v, dout, out or 0, dq, dk and dv.
        lse, delta: addresses; 0 if delta is not given.
    """
    q, k, v, dout, out, dq, dk, dv = places
    if (q | k | v | dout | out | dq | dk | dv) % 16:
        return False
    device = repeat.device
    stream = stream_handle(device)
    repeat.launch.tables.use_on(stream)
    scratch = repeat.new_scratch()  # held until the launch
    at, (stats, sums, semaphores, dq_sum) = scratch.data_ptr(), repeat.launch.scratch_at
    with on_device(device):
        repeat.run(
            q, k, v, dout, out,
            *((dq, 0) if repeat.in_fp32 else (at + dq_sum, dq)),
            dk, dv,
            lse, delta,
            at + stats, at + sums, at + semaphores, stream,
        )  # fmt: skip
    return True


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
    pattern, new_delta = _row_delta(out.shape, out.stride(), dout.stride(), out.dtype, out.device)
    made = new_delta()
    stream = stream_handle(out.device)
    params = pattern.filled(out.data_ptr(), dout.data_ptr(), made.data_ptr(), stream)
    with on_device(out.device):
        cuda_library().call("magi_row_delta", params)
    return made


@lru_cache(maxsize=64)
def _row_delta(
    shape: torch.Size,
    out: tuple[int, ...],
    dout: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Pattern, Callable[[], Tensor]]:
    """The parameters without addresses, from the strides of both tensors, and a function that makes
    delta."""
    views = (TensorView(0, *strides[:2]) for strides in (out, dout))
    params = DeltaParams(*views, 0, 0, *shape, DTYPE_CODES[dtype])
    new_delta = new_of(tuple(shape[:2]), torch.float32, device)
    return Pattern(params, ("out.data", "dout.data", "delta", "stream")), new_delta
