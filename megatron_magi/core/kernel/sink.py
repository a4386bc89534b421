"""Learnable sinks: extra logits in every row's softmax that carry no value.

To the kernels the sinks of a row are one key whose value is 0 and whose logit is ``sink_lse``, the
logsumexp of the sinks. It joins a row once, when the row's other keys have been summed:
``lse' = log(e^lse + e^sink_lse)``, ``out' = out e^(lse - lse')``. The gradients of q, k and v
follow from (out', lse') as they do from (out, lse) without sinks: a weight is e^(logit - lse').

T query tokens, H query heads, D head_dim of values, s sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_magi.checks import shown
from megatron_magi.core.kernel.autograd import differentiable_once, needs_dispatcher
from megatron_magi.core.kernel.backend import AttnCall, OutLse, acc_dtype
from megatron_magi.core.tensor_checks import tensor

SINK_LAYOUTS = {"sh": 2, "ssh": 3, "shd": 3}
"""Number of dimensions of a sink, by the name of its layout; "shd" is known and refused."""


def sink_lse_of(sink: Tensor | None, q_THD: Tensor) -> Tensor | None:
    """Sinks in the form of ``AttnCall.sink_lse``, differentiable: [H] from [s, H], or [T, H] from
    [T, s, H]. None without sinks.

    Args:
        sink: finite logits, any float dtype; [s, H]: the same for all rows; [T, s, H]: per token.
        q_THD: the queries.

    Raises:
        TypeError, ValueError: a sink of another shape, device or dtype class.
    """
    if sink is None:
        return None
    check_sink(sink, q_THD)
    logits = sink.to(acc_dtype(q_THD.dtype))
    if logits.shape[-2] == 1:
        return logits.squeeze(-2)
    if needs_dispatcher(logits):
        return logits.logsumexp(-2)
    total: Tensor = _LogSumExp.apply(logits)
    return total


class _LogSumExp(torch.autograd.Function):
    """``logsumexp`` over the last dimension but one, in one kernel. PyTorch's own takes eight, a
    visible part of a short attention call. Both save the same tensors in the same order, because a
    checkpoint may run one in the forward and the other when it recomputes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        total = logits.logcumsumexp(-2).select(-2, -1)
        ctx.save_for_backward(logits, total)
        return total

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        logits, _ = ctx.saved_tensors
        return (logits.softmax(-2) * grad.unsqueeze(-2),)


def join_sink_(out_THD: Tensor, lse_TH: Tensor, call: AttnCall) -> OutLse:
    """Let the sinks of a call join every row, in place, and return (out, lse). Without sinks both
    stay as they are.

    A row that sees no key keeps out 0; its lse becomes that of the sinks alone. nan stays nan.
    """
    if call.sink_lse is not None:
        # The sigmoid is e^lse / (e^lse + e^sink_lse): no -inf - -inf on rows that see nothing.
        out_THD.mul_(torch.sigmoid(lse_TH - call.sink_lse).unsqueeze(-1))
        lse_TH.copy_(torch.logaddexp(lse_TH, call.sink_lse))
    return out_THD, lse_TH


def check_joins(call: AttnCall, prev: OutLse | None) -> None:
    """Refuse sinks that do not fit a call, or that would join rows a second time.

    Raises:
        ValueError: an earlier result, or sinks of another shape, dtype or device.
    """
    sink_lse = call.sink_lse
    if sink_lse is None:
        return
    if prev is not None:
        raise ValueError(
            "sinks join the first of several calls whose results merge, got sink_lse with an "
            "earlier result; leave it out of the later calls"
        )
    rows_and_heads, dtype = call.q.shape[:2], acc_dtype(call.q.dtype)
    fits = sink_lse.shape in (rows_and_heads, rows_and_heads[1:])
    if not fits or sink_lse.dtype != dtype or sink_lse.device != call.q.device:
        raise ValueError(
            f"sink_lse must be [H] or [T, H] in {dtype} on {call.q.device}, T and H being "
            f"{list(rows_and_heads)}, got {list(sink_lse.shape)} in {sink_lse.dtype} on "
            f"{sink_lse.device}; make it with sink_lse_of"
        )


def check_layout(sink_layout: str, sink: Tensor | None = None) -> None:
    """Refuse a layout that no call computes, before any tensor is looked at, and then a sink whose
    dimensions are not those of the layout.

    Raises:
        TypeError: a sink that is no tensor.
        ValueError: an unknown layout, or a sink with other dimensions.
        NotImplementedError: sinks with values.
    """
    if not isinstance(sink_layout, str) or sink_layout not in SINK_LAYOUTS:
        raise ValueError(
            f"sink_layout must be 'sh' ([s, H]) or 'ssh' ([T, s, H]), got {shown(sink_layout)}; "
            f"use 'sh' for sinks shared by all tokens"
        )
    if sink_layout == "shd":
        raise NotImplementedError(
            "sinks must be logits without values ('sh' or 'ssh'), got sink_layout 'shd'; "
            "add the value-carrying tokens to k and v instead"
        )
    if sink is None:
        return
    tensor(sink, "sink")
    if sink.ndim != SINK_LAYOUTS[sink_layout]:
        raise ValueError(
            f"a sink of layout {sink_layout!r} must have {SINK_LAYOUTS[sink_layout]} dimensions, "
            f"got {list(sink.shape)}; 'sh' is [s, H] and 'ssh' is [T, s, H]"
        )


def check_sink(sink: Tensor, q_THD: Tensor) -> None:
    """Refuse sinks that are not [s, H] or [T, s, H] of q's tokens, heads and device.

    Raises:
        TypeError, ValueError: a sink of another shape, device or dtype class.
    """
    tensor(sink, "sink")
    tokens, heads = q_THD.shape[:2]
    fits = sink.ndim in (2, 3) and sink.shape[:-2] in ((), (tokens,)) and sink.shape[-1] == heads
    if not fits or sink.shape[-2] == 0:
        raise ValueError(
            f"a sink must be [s, H] for all tokens, or [T, s, H], with s >= 1, T = {tokens} and "
            f"H = {heads}, got {list(sink.shape)}; give one logit per sink and query head"
        )
    if sink.device != q_THD.device or not sink.is_floating_point():
        raise ValueError(
            f"the sink must be a float tensor on {q_THD.device}, got {sink.dtype} on "
            f"{sink.device}; move or cast it"
        )
