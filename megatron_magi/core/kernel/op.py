"""One device's attention as torch.library ops, and the shorter path of eager calls.

torch.compile, meta tensors, dispatch modes and autograd see ``torch.ops.magi``. PyTorch's Python
dispatch and autograd of such an op take longer than the launch itself, so an eager call that none
of them must see goes directly to the backend (``autograd.must_dispatch``).

T query tokens, S key tokens, H query heads, G key/value heads, D head_dim (values and their output
may have another one), N slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_magi.core.kernel.autograd import (
    differentiable_once,
    direct_apply,
    live,
    must_dispatch,
    refuse_gradients_of_transforms,
    refuse_second_derivative,
)
from megatron_magi.core.kernel.backend import (
    AttnBackend,
    AttnCall,
    GradCall,
    Gradients,
    OutLse,
    RepeatedBackward,
    RepeatedForward,
    acc_dtype,
    less_dlse,
    row_delta,
)
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.sink_gradient import sink_gradient
from megatron_magi.core.kernel.slice_table import SliceTable, slice_table
from megatron_magi.core.kernel.widths import widths_of

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


class Options(NamedTuple):
    """The arguments of ``attn_fwd`` after q, k, v and slices, in its order."""

    softmax_scale: float
    out_dtype: torch.dtype
    backend: str
    deterministic: bool
    softcap: float = 0.0
    sink_lse: Tensor | None = None
    """The sinks of the call (see AttnCall), which get gradients."""


Chosen = tuple[AttnBackend, SliceTable]


@dataclass(slots=True)
class Asked:
    """What is asked besides tensors. Calls of one form on the same slices may share it."""

    options: Options
    chosen: Chosen | None = None
    """The backend that computes these calls, and the slices in the form that it takes. None: not
    chosen yet."""
    forward: RepeatedForward | None = None
    """The backend's shorter way for repeated forwards. None: it has none, or it was not asked for
    one yet."""
    backward: RepeatedBackward | None = None
    num_forwards: int = 0
    """The number of forwards that were computed without the shorter way."""
    num_backwards: int = 0

    def without_sinks(self) -> Asked:
        """What a backward keeps, which has the sinks from autograd."""
        return Asked(self.options._replace(sink_lse=None), self.chosen)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Tensor,
    asked: Asked,
    max_logits: Tensor | None = None,
) -> OutLse:
    """(out [T, H, D], lse [T, H]), differentiable in q, k, v and sink_lse; slices int32 [N, 6].

    Raises:
        NotImplementedError: ``max_logits`` (see AttnCall) in a call that must be dispatched, or a
            gradient of a transform.
    """
    options = asked.options
    sink_lse = options.sink_lse
    sinks = () if sink_lse is None else (sink_lse,)
    if must_dispatch(q, k, v, slices, *sinks):
        return _dispatched((q, k, v), slices, options, max_logits)
    if asked.chosen is None:
        asked.chosen = _chosen(q, k, v, slices, options)
    inputs = live(q), live(k), live(v), None if sink_lse is None else live(sink_lse)
    needs = q.requires_grad or k.requires_grad or v.requires_grad
    needs = needs or (sink_lse is not None and sink_lse.requires_grad)
    if needs and torch.is_grad_enabled():
        out, lse = _apply(*inputs, (asked, slices, max_logits))
        return out, lse
    return _call_forward(inputs, asked, max_logits)


Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""q, k, v and sink_lse."""


def _dispatched(
    qkv: tuple[Tensor, Tensor, Tensor], slices: Tensor, options: Options, max_logits: Tensor | None
) -> OutLse:
    """See attend."""
    refuse_gradients_of_transforms(*qkv, *(() if options.sink_lse is None else (options.sink_lse,)))
    if max_logits is not None:
        raise NotImplementedError(
            "the largest logits require an eager call on plain tensors, got a call under "
            "torch.compile, a dispatch mode or a transform; leave return_max_logits out"
        )
    out, lse = torch.ops.magi.attn_fwd(*qkv, slices, *options)
    return out, lse


def _chosen(q: Tensor, k: Tensor, v: Tensor, slices: Tensor, options: Options) -> Chosen:
    """The backend that computes a call, and the slices as it takes them."""
    table = slice_table(slices, q.shape[0], k.shape[0])
    return select_backend(options.backend, q.device, q.dtype, widths_of(q, v)), table


def _forward(q: Tensor, k: Tensor, v: Tensor, slices: Tensor, *rest: Any) -> OutLse:
    options = Options(*rest)
    asked = Asked(options, _chosen(q, k, v, slices, options))
    return _call_forward((q, k, v, options.sink_lse), asked, None)


def _call_forward(inputs: Inputs, asked: Asked, max_logits: Tensor | None) -> OutLse:
    q, k, v, sink_lse = inputs
    if asked.forward is not None:
        made = asked.forward(q, k, v, max_logits)
        if made is not None:
            return made
    assert asked.chosen is not None, "the caller has chosen"
    (kernel, table), options = asked.chosen, asked.options
    numbers = options.softmax_scale, max_logits, options.softcap
    call = AttnCall(q, k, v, table, *numbers, sink_lse)
    made = kernel.forward(call, out_dtype=options.out_dtype)
    asked.num_forwards += 1
    if asked.num_forwards == 2:  # many are asked once only
        asked.forward = kernel.repeated_forward(call, options.out_dtype)
    return made


class _EagerAttn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_lse: Tensor | None,
        how: tuple[Asked, Tensor, Tensor | None],
    ) -> OutLse:  # fmt: skip
        """``how``: what is asked, its slices, ``AttnCall.max_logits``."""
        asked, slices, max_logits = how
        out, lse = _call_forward((q, k, v, sink_lse), asked, max_logits)
        # Saves what the dispatched op saves, in the same order, because a checkpoint may run one in
        # the forward and the other when it recomputes.
        ctx.save_for_backward(q, k, v, _saveable(slices), sink_lse, out, lse)
        ctx.set_materialize_grads(False)
        ctx.asked = asked if sink_lse is None else asked.without_sinks()
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, slices, sink_lse, out, lse = ctx.saved_tensors
        asked: Asked = ctx.asked
        if sink_lse is not None and not ctx.needs_input_grad[3]:
            sink_lse = None
        dout = torch.zeros_like(out) if dout is None else dout
        if must_dispatch(q, k, v, dout, *(() if dlse is None else (dlse,))):
            delta = less_dlse(row_delta(out, dout, lse.dtype), dlse)
            how = _of_backward(asked.options)
            grads = torch.ops.magi.attn_bwd(dout, q, k, v, lse, delta, slices, *how)
            return *grads, sink_gradient(sink_lse, lse, delta), None
        if dlse is None and sink_lse is None:  # the kernels compute delta themselves
            return *_call_backward((q, k, v), asked, (dout, lse, None, out)), None, None
        assert asked.chosen is not None, "the forward has chosen"
        delta = less_dlse(asked.chosen[0].delta(out, dout, lse.dtype), dlse)
        grads = _call_backward((q, k, v), asked, (dout, lse, delta, None))
        return *grads, sink_gradient(sink_lse, lse, delta), None


def _call_backward(
    qkv: tuple[Tensor, Tensor, Tensor],
    asked: Asked,
    given: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
) -> Gradients:
    """``given``: the first arguments of GradCall."""
    dout, lse, _, out = given
    if asked.backward is not None and out is not None:
        made = asked.backward(*qkv, out, lse, dout)
        if made is not None:
            return made
    assert asked.chosen is not None, "the forward has chosen"
    (kernel, table), options = asked.chosen, asked.options
    call = AttnCall(*qkv, table, options.softmax_scale, None, options.softcap)
    grad = GradCall(*given, qkv[0].dtype, None, None, options.deterministic)
    made = kernel.backward(call, grad)
    asked.num_backwards += 1
    if asked.num_backwards == 2 and out is not None:
        asked.backward = kernel.repeated_backward(call, grad)
    return made


_apply = direct_apply(_EagerAttn)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    slices, scale, *how = rest
    options = Options(scale, q.dtype, *how)
    kernel, table = _chosen(q, k, v, slices, options)
    call = AttnCall(q, k, v, table, scale, None, options.softcap)
    return kernel.backward(
        call, GradCall(dout, lse, delta, dtype=q.dtype, deterministic=options.deterministic)
    )


def _of_backward(options: Options) -> tuple[Any, ...]:
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
    options = Options(*rest)
    ctx.options = options._replace(sink_lse=None)
    ctx.save_for_backward(q, k, v, _saveable(slices), options.sink_lse, *output)


def _saveable(slices: Tensor) -> Tensor:
    """Autograd refuses to save tensors created in inference mode, as a mask's slices may be."""
    return slices.clone() if slices.is_inference() else slices


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, slices, sink_lse, out, lse = ctx.saved_tensors
    delta = less_dlse(row_delta(out, dout, lse.dtype), dlse)
    how = _of_backward(ctx.options)
    dq, dk, dv = torch.ops.magi.attn_bwd(dout, q, k, v, lse, delta, slices, *how)
    rest = (None,) * (len(Options._fields) - 1)  # of the options before sink_lse
    return dq, dk, dv, None, *rest, sink_gradient(sink_lse, lse, delta)


_library.impl("attn_fwd", _forward, "CompositeExplicitAutograd")
_library.impl("attn_bwd", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("magi::attn_fwd", _fake_forward, lib=_library)
torch.library.register_fake("magi::attn_bwd", _fake_backward, lib=_library)
torch.library.register_autograd("magi::attn_fwd", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("magi::attn_bwd", refuse_second_derivative, lib=_library)
