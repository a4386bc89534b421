"""Learnable sinks: extra logits in every row's softmax that carry no value.

A sink changes only the normaliser, so it is applied to (out, lse) after attention, on one device
or on a rank's rows alike: ``lse' = log(e^lse + sum e^sink)``, ``out' = out e^(lse - lse')``. Both
are plain differentiable tensors, so autograd passes the gradient of ``lse'`` and ``out'`` on to q,
k and v, and gives the sink ``-sum_rows p_sink * rowsum(out' * dout')``.

T query tokens, H query heads, D head_dim of values, s sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.checks import shown
from megatron_magi.core.tensor_checks import tensor

SINK_LAYOUTS = ("sh", "ssh", "shd")


def apply_sink(
    out_THD: Tensor, lse_TH: Tensor, sink: Tensor, sink_layout: str = "sh"
) -> tuple[Tensor, Tensor]:
    """(out', lse') after ``sink`` joined every row's softmax; differentiable in all three.

    A row that sees no key keeps out 0; its lse becomes that of the sinks alone.

    Args:
        out_THD: [T, H, D].
        lse_TH: [T, H], -inf where a row sees nothing.
        sink: finite logits, any float dtype; "sh": [s, H], the same for all rows; "ssh":
            [T, s, H].
        sink_layout: "sh" or "ssh".

    Returns:
        out' in the dtype of out_THD, lse' in the dtype of lse_TH.

    Raises:
        ValueError: an unknown layout, or a sink of another shape, device or dtype class.
        NotImplementedError: "shd", sinks with values.
    """
    _check(lse_TH, sink, sink_layout)
    sink_lse = sink.to(lse_TH.dtype).logsumexp(-2)
    # The sigmoid is e^lse / (e^lse + e^sink_lse): no -inf - -inf on rows that see nothing.
    weight = torch.sigmoid(lse_TH - sink_lse)
    out = (out_THD.to(lse_TH.dtype) * weight.unsqueeze(-1)).to(out_THD.dtype)
    return out, torch.logaddexp(lse_TH, sink_lse)


def check_layout(sink_layout: str) -> None:
    """Refuse a layout that no call computes, before any tensor exists."""
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


def _check(lse_TH: Tensor, sink: Tensor, sink_layout: str) -> None:
    check_layout(sink_layout)
    tensor(sink, "sink")
    tokens, heads = lse_TH.shape
    shape = [*sink.shape]
    wanted = (3, [tokens], "[T, s, H]") if sink_layout == "ssh" else (2, [], "[s, H]")
    fits = sink.ndim == wanted[0] and shape[:-2] == wanted[1] and shape[-1:] == [heads]
    if not fits or shape[-2] == 0:
        raise ValueError(
            f"a sink of layout {sink_layout!r} must be {wanted[2]} with s >= 1, T = {tokens} and "
            f"H = {heads}, got {shape}; give one logit per sink and query head"
        )
    if sink.device != lse_TH.device or not sink.is_floating_point():
        raise ValueError(
            f"the sink must be a float tensor on {lse_TH.device}, got {sink.dtype} on "
            f"{sink.device}; move or cast it"
        )
