"""MagiAttention's names for its FA4 kernels: forward and backward apart, the mask as an object.

Frameworks that have their own autograd function around these two import them. They run what the
backend "auto" chooses, and not always the backend "fa4".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_magi.checks import flag, instance, integers
from megatron_magi.core.kernel.attention import flex_flash_attn_func
from megatron_magi.core.kernel.backend import acc_dtype, row_delta
from megatron_magi.core.kernel.qkv_checks import FLOAT_DTYPES, check_qkv
from megatron_magi.core.kernel.sink import check_layout
from megatron_magi.core.kernel.slice_table import slices_tensor
from megatron_magi.core.kernel.softmax import check_softmax, scale_for
from megatron_magi.core.tensor_checks import tensor
from megatron_magi.magi_attention.mask_type import AttnMaskType, mask_from_typed
from megatron_magi.magi_attention.ranges import AttnRanges


@dataclass(frozen=True, eq=False)
class FA4AttnArg:
    """The mask of `fa4_fwd` and `fa4_bwd`, validated once.

    Raises:
        TypeError: no ranges, or codes that are no integers.
        ValueError: unpaired or out-of-bounds ranges, wrong types, slices that share a cell.
    """

    q_ranges: AttnRanges
    k_ranges: AttnRanges
    attn_type_map: Sequence[int]
    """A code for each range: 0 full, 1 causal, 2 inv_causal, 3 bi_causal."""
    seqlen_q: int
    seqlen_k: int
    headdim: int | None = None
    """Chooses tiles there; without effect here."""
    slices: Tensor = field(init=False, repr=False)
    """The mask as magi's kernels take it."""

    def __post_init__(self) -> None:
        name, remedy = "attn_type_map", "pass a code from 0 to 3 for each range"
        instance(self.attn_type_map, (Sequence, np.ndarray, Tensor), name, remedy)
        types = list(map(AttnMaskType.from_int_type, integers(self.attn_type_map, name)))
        ranges = self.q_ranges, self.k_ranges
        mask = mask_from_typed(*ranges, types, self.seqlen_q, self.seqlen_k)
        object.__setattr__(self, "slices", slices_tensor(mask))


@torch.no_grad()
def fa4_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    attn_arg: FA4AttnArg,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink_layout: str = "sh",
) -> tuple[Tensor, Tensor]:
    """Attention on one device without a graph: (out [T, H, D], lse [T, H]).

    The arguments are those of ``flex_flash_attn_func``, the mask being ``attn_arg``.

    Raises:
        TypeError, ValueError: inputs that do not fit, or of other lengths than the mask.
    """
    _check_inputs(q, k, v, attn_arg)
    check_layout(sink_layout, sink)
    out, meta = flex_flash_attn_func(
        q, k, v, slices=attn_arg.slices, softmax_scale=softmax_scale, softcap=softcap, sink=sink
    )
    return out, meta.lse


@torch.no_grad()
def fa4_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    o: Tensor,
    lse: Tensor,
    attn_arg: FA4AttnArg,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink_layout: str = "sh",
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """(dq, dk, dv, None), the gradients of `fa4_fwd` in the dtype of q.

    Args:
        do: [T, H, E], the gradient of out, any float dtype.
        o, lse: what `fa4_fwd` gave for the same q, k, v, mask and numbers.
        deterministic: gradients with equal bits from run to run.

    Raises:
        TypeError, ValueError: inputs that do not fit, or of other lengths than the mask.
        NotImplementedError: a sink.
    """
    _check_inputs(q, k, v, attn_arg)
    if sink is not None:
        raise NotImplementedError(
            "fa4_bwd needs sink=None, got a tensor; flex_flash_attn_func has gradients of sinks"
        )
    _check_saved(do, o, lse, q, v)
    check_softmax(softmax_scale, softcap, None)
    how = scale_for(softmax_scale, q), "auto", flag(deterministic, "deterministic"), softcap
    delta = row_delta(o, do, lse.dtype)
    grads = torch.ops.magi.attn_bwd(do, q, k, v, lse, delta, attn_arg.slices, *how)
    return *grads, None


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, attn_arg: FA4AttnArg) -> None:
    remedy = "make one with FA4AttnArg(q_ranges, k_ranges, attn_type_map, seqlen_q, seqlen_k)"
    instance(attn_arg, FA4AttnArg, "attn_arg", remedy)
    check_qkv(q, k, v)
    if (len(q), len(k)) != (attn_arg.seqlen_q, attn_arg.seqlen_k):
        raise ValueError(
            f"q and k must have the {attn_arg.seqlen_q} and {attn_arg.seqlen_k} tokens of "
            f"attn_arg, got {len(q)} and {len(k)}; make an FA4AttnArg of these lengths"
        )


def _check_saved(do: Tensor, o: Tensor, lse: Tensor, q: Tensor, v: Tensor) -> None:
    """Check what a backward takes besides the inputs, which have been checked."""
    shape, sums = (*q.shape[:2], v.shape[2]), (acc_dtype(q.dtype),)
    _check_one(do, "do", shape, FLOAT_DTYPES, q)
    _check_one(o, "o", shape, FLOAT_DTYPES, q)
    _check_one(lse, "lse", shape[:2], sums, q)


def _check_one(
    x: Tensor, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], q: Tensor
) -> None:
    tensor(x, name)
    if x.device != q.device or x.layout is not torch.strided:
        raise ValueError(
            f"{name} must be a dense tensor on q's device {q.device}, got {x.layout} on "
            f"{x.device}; pass do, o and lse as fa4_fwd gave o and lse"
        )
    if x.dtype not in dtypes:
        raise TypeError(
            f"{name} must be {' or '.join(map(str, dtypes))} for a q in {q.dtype}, got {x.dtype}; "
            f"pass what fa4_fwd gave, or cast it"
        )
    if x.shape != shape:
        raise ValueError(
            f"{name} must have the shape {list(shape)} for this q and v, got {list(x.shape)}; do "
            f"and o are [T, H, E] and lse is [T, H]: pass o and lse of fa4_fwd"
        )
