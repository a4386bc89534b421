"""One device's attention as torch.library ops, and the shorter path of eager calls.

torch.compile, meta tensors, dispatch modes and autograd see ``torch.ops.magi``. PyTorch's Python
dispatch and autograd of such an op take longer than the launch itself, so an eager call that none
of them must see goes directly to the backend (``autograd.needs_dispatcher``).

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim of queries and keys, E of
values and outputs, N slices.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_magi.core.kernel.autograd import (
    apply_without_functorch,
    differentiable_once,
    needs_dispatcher,
    refuse_gradients_of_transforms,
    refuse_second_derivative,
    unwrap_dead_functorch,
)
from megatron_magi.core.kernel.backend import (
    AttnBackend,
    AttnCall,
    GradCall,
    OutLse,
    PreparedForward,
    acc_dtype,
    row_delta,
    subtract_dlse,
)
from megatron_magi.core.kernel.head_dims import widths_of
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.sink_gradient import sink_gradient
from megatron_magi.core.kernel.slice_table import (
    SliceTable,
    seen_table,
    slice_table,
    tensor_of_mask,
)
from megatron_magi.core.mask import AttnMask

_library = torch.library.Library("magi", "DEF")
_library.define(
    "attn_fwd(Tensor q, Tensor k, Tensor v, Tensor slices, float softmax_scale, "
    "ScalarType out_dtype, str backend, bool deterministic, float softcap=0.0, "
    "Tensor? sink_lse=None) -> (Tensor out, Tensor lse)"
)
_library.define(
    "attn_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, "
    "Tensor slices, float softmax_scale, str backend, bool deterministic, float softcap=0.0) "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)


class AttnOptions(NamedTuple):
    """The arguments of ``attn_fwd`` after q, k, v and slices, in its order."""

    softmax_scale: float
    out_dtype: torch.dtype
    backend: str
    deterministic: bool
    softcap: float = 0.0
    sink_lse: Tensor | None = None
    """The sinks of the call (see AttnCall), which get gradients."""


class Prepared(NamedTuple):
    """State shared by calls of one key on the same slices, after the first was checked."""

    options: AttnOptions
    """Without sinks: a call with sinks is prepared every time."""
    kernel: AttnBackend
    forward: PreparedForward


class AttnRequest(NamedTuple):
    """Options of a call besides queries, keys and values."""

    slices: Tensor
    """int32 [N, 6]"""
    options: AttnOptions
    key: Hashable = None
    """The key by which later calls find what this one prepared; None: each is prepared anew."""
    table: SliceTable | None = None
    """The slices as backends take them; None: not made yet."""
    prepared: Prepared | None = None
    """None: the call is the first of its key."""


def lookup_prepared(slices: Tensor | AttnMask, key: Hashable) -> AttnRequest | None:
    """A call whose key is in the table of its slices, or None."""
    rows = slices if isinstance(slices, Tensor) else tensor_of_mask(slices)
    table = seen_table(rows)
    found: Prepared | None = None if table is None else table.calls.get(key)
    return None if found is None else AttnRequest(rows, found.options, key, table, found)


def attend(
    q: Tensor, k: Tensor, v: Tensor, request: AttnRequest, max_logits: Tensor | None = None
) -> OutLse:
    """(out [T, H, E], lse [T, H]), differentiable in q, k, v and sink_lse.

    Raises:
        NotImplementedError: ``max_logits`` (see AttnCall) in a call that must be dispatched, or a
            gradient of a transform.
    """
    sink_lse = request.options.sink_lse
    sinks = () if sink_lse is None else (sink_lse,)
    if needs_dispatcher(q, k, v, request.slices, *sinks):
        return _dispatched(q, k, v, request, max_logits)
    q, k, v = unwrap_dead_functorch(q), unwrap_dead_functorch(k), unwrap_dead_functorch(v)
    sink_lse = None if sink_lse is None else unwrap_dead_functorch(sink_lse)
    if request.prepared is None:
        request = _prepared(q, k, v, sink_lse, request)
    needs = q.requires_grad or k.requires_grad or v.requires_grad
    needs = needs or (sink_lse is not None and sink_lse.requires_grad)
    if needs and torch.is_grad_enabled():
        out, lse = _apply(q, k, v, sink_lse, request, max_logits)
        return out, lse
    return _call_forward(q, k, v, sink_lse, request, max_logits)


def _dispatched(
    q: Tensor, k: Tensor, v: Tensor, request: AttnRequest, max_logits: Tensor | None
) -> OutLse:
    """See attend."""
    sink_lse = request.options.sink_lse
    refuse_gradients_of_transforms(q, k, v, *(() if sink_lse is None else (sink_lse,)))
    if max_logits is not None:
        raise NotImplementedError(
            "the largest logits require an eager call on plain tensors, got a call under "
            "torch.compile, a dispatch mode or a transform; leave return_max_logits out"
        )
    out, lse = torch.ops.magi.attn_fwd(q, k, v, request.slices, *request.options)
    return out, lse


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, sink_lse: Tensor | None, request: AttnRequest
) -> AttnRequest:
    """The first call of a key, with what further ones find in the table of its slices."""
    options = request.options
    table = slice_table(request.slices, q.shape[0], k.shape[0])
    kernel = select_backend(options.backend, q.device, q.dtype, widths_of(q, v))
    call = AttnCall(q, k, v, table, options.softmax_scale, None, options.softcap, sink_lse)
    forward = kernel.prepared_forward(call, options.out_dtype)
    made = Prepared(options._replace(sink_lse=None), kernel, forward)
    if request.key is not None:
        table.calls.keep(request.key, made)
    return AttnRequest(request.slices, made.options, request.key, table, made)


def _forward(q: Tensor, k: Tensor, v: Tensor, slices: Tensor, *rest: Any) -> OutLse:
    options = AttnOptions(*rest)
    inputs = q, k, v, options.sink_lse
    return _call_forward(*inputs, _prepared(*inputs, AttnRequest(slices, options)), None)


def _call_forward(
    q: Tensor, k: Tensor, v: Tensor, sink_lse: Tensor | None,
    request: AttnRequest, max_logits: Tensor | None,
) -> OutLse:  # fmt: skip
    table, prepared = request.table, request.prepared
    assert table is not None and prepared is not None, "the caller has prepared the call"
    options = prepared.options
    return prepared.forward(
        AttnCall(q, k, v, table, options.softmax_scale, max_logits, options.softcap, sink_lse)
    )


class _EagerAttn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_lse: Tensor | None,
        request: AttnRequest, max_logits: Tensor | None,
    ) -> OutLse:  # fmt: skip
        out, lse = _call_forward(q, k, v, sink_lse, request, max_logits)
        # Saves what the dispatched op saves, in the same order, because a checkpoint may run one in
        # the forward and the other when it recomputes.
        ctx.save_for_backward(q, k, v, _saveable(request.slices), sink_lse, out, lse)
        ctx.set_materialize_grads(False)
        ctx.request = request
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, slices, sink_lse, out, lse = ctx.saved_tensors
        _, _, _, table, (options, kernel, _) = ctx.request
        if sink_lse is not None and not ctx.needs_input_grad[3]:
            sink_lse = None
        dout = torch.zeros_like(out) if dout is None else dout
        if needs_dispatcher(q, k, v, dout, *(() if dlse is None else (dlse,))):
            sums = subtract_dlse(row_delta(out, dout, lse.dtype), dlse)
            how = _of_backward(options)
            grads = torch.ops.magi.attn_bwd(dout, q, k, v, lse, sums, slices, *how)
            return *grads, sink_gradient(sink_lse, lse, sums), None, None
        delta: Tensor | None = None  # the kernels compute it themselves
        if dlse is not None or sink_lse is not None:
            delta = subtract_dlse(kernel.delta(out, dout, lse.dtype), dlse)
        call = AttnCall(q, k, v, table, options.softmax_scale, None, options.softcap)
        given = out if delta is None else None
        grad = GradCall(dout, lse, delta, given, q.dtype, None, None, options.deterministic)
        of_sinks = None if delta is None else sink_gradient(sink_lse, lse, delta)
        return *kernel.backward(call, grad), of_sinks, None, None


_apply = apply_without_functorch(_EagerAttn)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    slices, scale, *how = rest
    options = AttnOptions(scale, q.dtype, *how)
    table = slice_table(slices, q.shape[0], k.shape[0])
    kernel = select_backend(options.backend, q.device, q.dtype, widths_of(q, v))
    call = AttnCall(q, k, v, table, scale, None, options.softcap)
    return kernel.backward(
        call, GradCall(dout, lse, delta, dtype=q.dtype, deterministic=options.deterministic)
    )


def _of_backward(options: AttnOptions) -> tuple[Any, ...]:
    """The arguments of ``attn_bwd`` after its tensors."""
    scale, _, *how, _ = options
    return scale, *how


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, slices: Tensor, *options: Any) -> OutLse:
    out = q.new_empty((*q.shape[:2], v.shape[2]), dtype=options[1])
    return out, q.new_empty(q.shape[:2], dtype=acc_dtype(q.dtype))


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: OutLse) -> None:
    q, k, v, slices, *rest = inputs
    options = AttnOptions(*rest)
    ctx.options = options._replace(sink_lse=None)
    ctx.save_for_backward(q, k, v, _saveable(slices), options.sink_lse, *output)


def _saveable(slices: Tensor) -> Tensor:
    """Autograd refuses to save tensors created in inference mode, as a mask's slices may be."""
    return slices.clone() if slices.is_inference() else slices


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, slices, sink_lse, out, lse = ctx.saved_tensors
    delta = subtract_dlse(row_delta(out, dout, lse.dtype), dlse)
    how = _of_backward(ctx.options)
    dq, dk, dv = torch.ops.magi.attn_bwd(dout, q, k, v, lse, delta, slices, *how)
    rest = (None,) * (len(AttnOptions._fields) - 1)  # of the options before sink_lse
    return dq, dk, dv, None, *rest, sink_gradient(sink_lse, lse, delta)


_library.impl("attn_fwd", _forward, "CompositeExplicitAutograd")
_library.impl("attn_bwd", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("magi::attn_fwd", _fake_forward, lib=_library)
torch.library.register_fake("magi::attn_bwd", _fake_backward, lib=_library)
torch.library.register_autograd("magi::attn_fwd", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("magi::attn_bwd", refuse_second_derivative, lib=_library)
