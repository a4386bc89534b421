"""PyTorch's FlexAttention behind the AttnBackend protocol, for GPUs without kernels of magi's own.

``block_mask`` makes its mask. A table with many slices a row is computed in the parts that
``slice_parts`` makes. This backend is slower than the CUDA backend. It runs if it is chosen
explicitly, if the GPU is not a Hopper, or if heads are too wide for magi's kernels.
``select_backend`` logs the choice.
Shapes: T query tokens, S key tokens, H query heads, G key/value heads, D head_dim of queries
and keys, E of values.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_magi.core.kernel.backend import (
    AttnCall,
    GradCall,
    OutLse,
    acc_dtype,
    final_delta,
)
from megatron_magi.core.kernel.flex_block_mask import (
    block_mask,
    clear_empty_rows,
    empty_rows,
    rounded,
)
from megatron_magi.core.kernel.key_splitting import InParts
from megatron_magi.core.kernel.split_slices import Part

MOST_SHAPES = 128
"""The most shapes that are compiled. PyTorch stops at 8 and then silently runs uncompiled."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FlexBackend(InParts):
    """Forward and backward by FlexAttention: compiled on GPUs, and eager on the CPU, for tests.

    A part's backward recomputes its forward: FlexAttention's backward needs the part's own out
    and lse, while the protocol passes the final lse only. With w = exp(lse of this part - final
    lse), out = sum of w * part's out, so the part's out has the gradient w * dout and its lse has
    w * (rowsum(part's out * dout) - delta).
    """

    name = "flex"

    def check(self, call: AttnCall) -> None:
        super().check(call)
        if call.q.dtype not in DTYPES:
            raise NotImplementedError(
                f"FlexAttention takes bf16, fp16 and fp32, got {call.q.dtype}; cast the inputs or "
                f"use backend='reference'"
            )
        narrowest = min(call.q.shape[2], call.v.shape[2])
        if narrowest < 16:
            raise NotImplementedError(
                f"FlexAttention needs head_dim 16 or more, got {narrowest}; pad the heads or use "
                f"backend='reference'"
            )

    def attend(self, part: Part) -> OutLse:
        q_THD, k_SGD, v_SGD, table, softmax_scale = part.call[:5]
        softcap = part.call.softcap
        acc = acc_dtype(q_THD.dtype)
        if len(table.slices) == 0 or 0 in q_THD.shape or 0 in k_SGD.shape:
            out = q_THD.new_zeros((*q_THD.shape[:2], v_SGD.shape[2]))
            return out, torch.full(q_THD.shape[:2], -torch.inf, dtype=acc, device=q_THD.device)
        q, k, v = (padded(x).transpose(0, 1).unsqueeze(0) for x in (q_THD, k_SGD, v_SGD))
        out, lse = _flex(q_THD.device.type)(
            q,
            k,
            v,
            score_mod=_cap(softcap) if softcap else None,
            block_mask=block_mask(table, q_THD.device, part.least_intervals),
            scale=softmax_scale,
            enable_gqa=q_THD.shape[1] != k_SGD.shape[1],
            return_lse=True,
        )
        rows = slice(0, len(q_THD))
        # PyTorch versions differ in what they return for rows that see nothing. Such a row is left
        # out, because its gradient must be 0, and 0 times nan would reach dv.
        return clear_empty_rows(out[0].transpose(0, 1)[rows], lse[0].T[rows].to(acc), table)

    def part_gradients(self, part: Part, grad: GradCall) -> tuple[Tensor, ...]:
        q, k, v = leaves = [x.detach().requires_grad_() for x in part.call[:3]]
        with torch.enable_grad():
            out, lse = self.attend(part._replace(call=part.call._replace(q=q, k=k, v=v)))
        if not out.requires_grad:  # nothing is visible
            return tuple(torch.zeros_like(x) for x in leaves)
        with torch.no_grad():
            weight = lse - grad.lse
            if (empty := empty_rows(part.call.table, q.device)) is not None:
                weight.masked_fill_(empty, -torch.inf)
            weight.exp_()
            dout = weight.unsqueeze(-1) * grad.dout
            dlse = (out * dout).sum(-1) - weight * final_delta(grad, lse.dtype)
        given = dout.to(out.dtype), dlse.to(lse.dtype)
        return torch.autograd.grad((out, lse), leaves, given)


@functools.lru_cache(maxsize=64)  # one function for one softcap, because it is compiled
def _cap(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@functools.lru_cache(maxsize=2)
def _flex(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if device_type == "cpu":
        return _without_warnings(flex_attention)
    return _compiled(flex_attention)


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile ``function`` once for every shape, and refuse to go on uncompiled."""
    import torch._dynamo as dynamo

    compiled = torch.compile(function, dynamic=False, **options)
    limits = {name: value for name, value in _limits().items() if hasattr(dynamo.config, name)}

    def call(*args: Any, **kwargs: Any) -> Any:
        with dynamo.config.patch(limits):
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                if "LimitHit" not in type(error).__name__:
                    raise
                raise NotImplementedError(
                    f"FlexAttention is compiled for at most {MOST_SHAPES} shapes, got one more; "
                    f"use fewer lengths of sequences, or a GPU that has magi's own kernels"
                ) from error

    return call


def _limits() -> dict[str, int | bool]:
    """Settings of PyTorch's compiler, by the names of all versions."""
    return {
        "recompile_limit": MOST_SHAPES,
        "cache_size_limit": MOST_SHAPES,  # the name in PyTorch 2.6
        "accumulated_recompile_limit": 8 * MOST_SHAPES,
        "accumulated_cache_size_limit": 8 * MOST_SHAPES,
        "fail_on_recompile_limit_hit": True,
        "fail_on_cache_limit_hit": True,
    }


def padded(x_THD: Tensor) -> Tensor:
    """x with rows of 0 appended up to the next rounded length; the mask hides them."""
    return torch.nn.functional.pad(x_THD, (0, 0, 0, 0, 0, rounded(len(x_THD)) - len(x_THD)))


def _without_warnings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Silence the warning that the eager CPU form is slow: it is for tests."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)

    return call
