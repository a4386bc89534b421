"""The backward on Hopper: the choice, its gradients and scratch memory, one launch
(csrc/attention/backward).

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim, E width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from megatron_magi.core.cuda.abi import (
    DTYPE_CODES,
    BwdParams,
    DeltaParams,
    ParamTemplate,
    TensorView,
)
from megatron_magi.core.cuda.library import (
    CudaLibrary,
    cuda_library,
    on_device,
    stream_handle,
)
from megatron_magi.core.kernel.autograd import needs_dispatcher
from megatron_magi.core.kernel.backend import (
    AttnCall,
    GradCall,
    Gradients,
    row_delta,
)
from megatron_magi.core.kernel.call_key import call_key, key_of, key_of_pair
from megatron_magi.core.kernel.head_dims import COMPILED_WIDTHS, HeadDims, widths_of
from megatron_magi.core.kernel.hopper.call_checks import (
    DTYPES,
    check_call,
    check_gradients,
    widths_for,
)
from megatron_magi.core.kernel.hopper.choice import chosen_backward
from megatron_magi.core.kernel.hopper.launch_values import (
    ChosenBackward,
    HeadsKey,
    aligned,
    has_aligned_rows,
    new_of,
)
from megatron_magi.core.kernel.hopper.padding import (
    deliver_gradients,
    padded_call,
    padded_grad,
)

VALUE_DIMS = {widths.value_dim for widths in COMPILED_WIDTHS}


PATCHED_FIELDS = (
    *(f"{name}.data" for name in ("q", "k", "v", "dout", "out", "dq_acc", "dq", "dk", "dv")),
    *("lse", "delta", "stats", "partial", "semaphores", "stream"),
)
"""The fields of BwdParams in which calls of one key differ."""


Backward = Callable[[AttnCall, GradCall], Gradients]
"""Function that computes the backwards of one key."""


def backward(call: AttnCall, grad: GradCall) -> Gradients:
    """See AttnBackend.backward.

    Returns:
        dq [T, H, D] (``grad.dq`` itself if given), dk [S, G, D] and dv [S, G, E] (``grad.dkv``
        itself if given).

    Raises:
        TypeError, ValueError, NotImplementedError: a call that the kernels do not take.
        CudaKernelError: a launch failed.
    """
    q, k, v, table, scale, _, softcap, _ = call
    dout, lse, delta, out, dtype, dq, dkv, deterministic = grad
    key = (
        call_key(q, k, v), scale, softcap,
        dout.shape, dout.stride(), dout.dtype, dout.device,
        lse.shape, lse.stride(), lse.dtype, lse.device,
        None if delta is None else key_of(delta), None if out is None else key_of(out), dtype,
        None if dq is None else key_of(dq), None if dkv is None else key_of_pair(dkv),
        deterministic,
    )  # fmt: skip
    found: Backward | None = table.calls.get(key)
    if found is None:
        found = _prepare(call, grad)
        table.calls.keep(key, found)
    return found(call, grad)


def _prepare(call: AttnCall, grad: GradCall) -> Backward:
    """Function that computes calls of a key whose first call passed the checks."""
    widths = widths_for(call)
    if widths != widths_of(call.q, call.v):
        return partial(_on_wider_heads, widths)
    check_call(call)
    if not _is_in_one_dtype(call, grad):
        return _in_one_dtype
    check_gradients(call, grad)
    dtype = grad.dtype or torch.float32
    new_grads = tuple(new_of(tuple(x.shape), dtype, x.device) for x in call[:3])
    if call.table.num_q == 0 or call.table.num_k == 0:
        return partial(_without_tokens, new_grads)
    given = (grad.dout,) if grad.out is None else (grad.dout, grad.out)
    if not all(map(has_aligned_rows, (*call[:3], *given))):
        return _on_copies
    chosen = chosen_backward(call.table, HeadsKey.of(call), grad.deterministic)
    made = _results(new_grads, grad)
    in_fp32 = made[0].dtype == torch.float32
    floats = chosen.scratch_at[3] // 4 + (0 if in_fp32 else made[0].numel())
    new_scratch = new_of((floats,), torch.float32, call.q.device)
    pattern = ParamTemplate(_params(chosen, call, grad, made), PATCHED_FIELDS)
    run = cuda_library().prepared("magi_attn_bwd", pattern)
    return Launch(call.q.device, chosen, run, new_grads, new_scratch, in_fp32)


def _results(new_grads: tuple[Callable[[], Tensor], ...], grad: GradCall) -> Gradients:
    """Where the gradients are written: given tensors, or new ones."""
    new_dq, new_dk, new_dv = new_grads
    dq = new_dq() if grad.dq is None else grad.dq
    return (dq, new_dk(), new_dv()) if grad.dkv is None else (dq, *grad.dkv)


def _without_tokens(
    new_grads: tuple[Callable[[], Tensor], ...], call: AttnCall, grad: GradCall
) -> Gradients:
    dq, dk, dv = _results(new_grads, grad)
    return dq.zero_() if grad.dq is None else dq, dk.zero_(), dv.zero_()


def _on_wider_heads(widths: HeadDims, call: AttnCall, grad: GradCall) -> Gradients:
    """The same call on heads that a kernel has."""
    wide = padded_call(call, widths)
    return deliver_gradients(backward(wide, padded_grad(grad, wide)), call, grad)


def _is_in_one_dtype(call: AttnCall, grad: GradCall) -> bool:
    out, dtype = grad.out, call.q.dtype
    return grad.dout.dtype == dtype and (out is None or out.dtype == dtype)


def _in_one_dtype(call: AttnCall, grad: GradCall) -> Gradients:
    """The same call with dout in q's dtype. As ``out`` or dout has another dtype, delta replaces
    ``out``: the kernel would compute delta from rounded values."""
    if grad.out is not None:
        grad = grad._replace(delta=delta(grad.out, grad.dout, grad.lse.dtype), out=None)
    return backward(call, grad._replace(dout=grad.dout.to(call.q.dtype)))


def _on_copies(call: AttnCall, grad: GradCall) -> Gradients:
    """The same call on copies of those tensors that a kernel cannot read."""
    q, k, v = map(aligned, call[:3])
    dout, out = aligned(grad.dout), None if grad.out is None else aligned(grad.out)
    return backward(call._replace(q=q, k=k, v=v), grad._replace(dout=dout, out=out))


def _params(chosen: ChosenBackward, call: AttnCall, grad: GradCall, made: Gradients) -> BwdParams:
    """The parameters of a launch, without the fields in which calls of one key differ."""
    (q, k, v), (dq, dk, dv) = call[:3], made
    p = BwdParams.from_buffer_copy(chosen.params)
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


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: what computes most calls of a key."""

    device: torch.device
    chosen: ChosenBackward
    run: Callable[..., None]
    """A launch; its arguments are the fields of PATCHED_FIELDS."""
    new_grads: tuple[Callable[[], Tensor], ...]
    """They make dq, dk and dv."""
    new_scratch: Callable[[], Tensor]
    in_fp32: bool
    """True if dq is made in fp32."""

    def __call__(self, call: AttnCall, grad: GradCall) -> Gradients:
        """On the current stream, without synchronisation."""
        made = dq, dk, dv = _results(self.new_grads, grad)
        dout, lse, delta, out, *_ = grad
        reads = (
            call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr(), dout.data_ptr(),
            0 if out is None else out.data_ptr(),
        )  # fmt: skip
        at_dq, at_dk, at_dv = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        if (reads[0] | reads[1] | reads[2] | reads[3] | reads[4]) % 16:
            return _on_copies(call, grad)
        if (at_dq | at_dk | at_dv) % 16:
            check_gradients(call, grad)
        stream = stream_handle(self.device)
        self.chosen.tables.use_on(stream)
        scratch = self.new_scratch()  # held until the launch
        at, (stats, sums, semaphores, dq_sum) = scratch.data_ptr(), self.chosen.scratch_at
        sum_and_dq = (at_dq, 0) if self.in_fp32 else (at + dq_sum, at_dq)
        of_rows = lse.data_ptr(), 0 if delta is None else delta.data_ptr()
        of_scratch = at + stats, at + sums, at + semaphores
        with on_device(self.device):
            self.run(*reads, *sum_and_dq, at_dk, at_dv, *of_rows, *of_scratch, stream)
        return made


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
        and not needs_dispatcher(out, dout)
    )
    return kernel_delta(out, dout) if fits else row_delta(out, dout, dtype)


def kernel_delta(out_THD: Tensor, dout_THD: Tensor) -> Tensor:
    """delta as fp32 [T, H], by one launch on the current stream."""
    out, dout = aligned(out_THD), aligned(dout_THD)
    of_both = out.shape, out.dtype, (out.stride(), dout.stride())
    run, new_delta = _row_delta(cuda_library(), out.device, *of_both)
    made, stream = new_delta(), stream_handle(out.device)
    with on_device(out.device):
        run(out.data_ptr(), dout.data_ptr(), made.data_ptr(), stream)
    return made


@lru_cache(maxsize=64)
def _row_delta(
    library: CudaLibrary,
    device: torch.device,
    shape: torch.Size,
    dtype: torch.dtype,
    strides_of_both: tuple[tuple[int, ...], ...],
) -> tuple[Callable[..., None], Callable[[], Tensor]]:
    """A launch as a function of the addresses of out, dout and delta and of the stream, and what
    makes delta."""
    views = (TensorView(0, *strides[:2]) for strides in strides_of_both)
    params = DeltaParams(*views, 0, 0, *shape, DTYPE_CODES[dtype])
    new_delta = new_of(tuple(shape[:2]), torch.float32, device)
    pattern = ParamTemplate(params, ("out.data", "dout.data", "delta", "stream"))
    return library.prepared("magi_row_delta", pattern), new_delta
