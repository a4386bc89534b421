"""PyTorch's FlexAttention behind the AttnBackend protocol, for GPUs without our own kernels.

``flex_mask`` makes its block mask. This backend is slower than the CUDA backend. It runs if it is
chosen explicitly or the GPU is not a Hopper, and ``select_backend`` logs the choice.
Shapes: T query tokens, S key tokens, H query heads, G key/value heads, D head_dim (values and
their output may have another one).
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
    deliver,
    final_delta,
    put_rows,
    row_delta,
)
from megatron_magi.core.kernel.flex_mask import block_mask, empty_rows, rounded
from megatron_magi.core.kernel.merge import merge_

MOST_SHAPES = 128
"""Limit of compiled shapes. PyTorch's own limit is 8, after which it silently runs uncompiled."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FlexBackend:
    """Forward and backward by FlexAttention, compiled on GPUs and eager on the CPU (tests).

    A stage's backward recomputes its forward: FlexAttention's backward needs the stage's own out
    and lse, while the protocol passes the final lse only.
    """

    name = "flex"
    adds_atomically = False
    delta = staticmethod(row_delta)

    def forward(
        self,
        call: AttnCall,
        *,
        prev: OutLse | None = None,
        into: OutLse | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> OutLse:
        """See AttnBackend.

        Raises:
            NotImplementedError: a dtype or head_dim that FlexAttention cannot take.
        """
        out, lse = self._attend(call)
        if into is not None:
            return put_rows((out, lse), call.table, into)
        if prev is None:
            return out.to(out_dtype or call.q.dtype), lse
        merge_(*prev, out.to(prev[0].dtype), lse)
        return prev

    def backward(self, call: AttnCall, grad: GradCall) -> tuple[Tensor, Tensor, Tensor]:
        """See AttnBackend; it raises the same errors as ``forward``.

        With w = exp(lse of this stage - final lse), out = sum of w * stage out, so the stage's out
        has the gradient w * dout and its lse has w * (rowsum(stage out * dout) - delta).
        """
        acc = acc_dtype(call.q.dtype)
        wanted = grad.dtype or acc
        delta = final_delta(grad, acc)
        q, k, v = leaves = [x.detach().requires_grad_() for x in call[:3]]
        with torch.enable_grad():
            own_out, own_lse = self._attend(call._replace(q=q, k=k, v=v))
        with torch.no_grad():
            empty = own_lse == -torch.inf
            weight = (own_lse - grad.lse).masked_fill_(empty, -torch.inf).exp_()
            dout = weight.unsqueeze(-1) * grad.dout
            dlse = (own_out * dout).sum(-1) - weight * delta
        grads: tuple[Tensor | None, ...] = (None, None, None)  # nothing is visible
        if own_out.requires_grad:
            given = dout.to(own_out.dtype), dlse.to(own_lse.dtype)
            grads = torch.autograd.grad((own_out, own_lse), leaves, given, allow_unused=True)
        dq, dk, dv = (
            torch.zeros_like(leaf, dtype=wanted) if made is None else made.to(wanted)
            for leaf, made in zip(leaves, grads, strict=True)
        )
        return dq if grad.dq is None else grad.dq.add_(dq), *deliver((dk, dv), grad.dkv)

    def _attend(self, call: AttnCall) -> OutLse:
        """out [T, H, D] and lse [T, H] in the accumulation dtype, differentiable."""
        q_THD, k_SGD, v_SGD, table = call[:4]
        if call.max_logits is not None:
            raise NotImplementedError(
                "the largest logits require the kernel 'cuda' (Hopper) or 'reference', got 'flex', "
                "which does not keep them; bound the scores by the norms of q and k rows"
            )
        check_inputs(q_THD, v_SGD)
        acc = acc_dtype(q_THD.dtype)
        if len(table.slices) == 0 or 0 in q_THD.shape or 0 in k_SGD.shape:
            out = q_THD.new_zeros((*q_THD.shape[:2], v_SGD.shape[2]), dtype=acc)
            return out, torch.full(q_THD.shape[:2], -torch.inf, dtype=acc, device=q_THD.device)
        q, k, v = (padded(x).transpose(0, 1).unsqueeze(0) for x in (q_THD, k_SGD, v_SGD))
        out, lse = _flex(q_THD.device.type)(
            q,
            k,
            v,
            score_mod=_cap(call.softcap) if call.softcap else None,
            block_mask=block_mask(table, q_THD.device),
            scale=call.softmax_scale,
            enable_gqa=q_THD.shape[1] != k_SGD.shape[1],
            return_lse=True,
        )
        rows = slice(0, len(q_THD))
        out, lse = out[0].transpose(0, 1)[rows].to(acc), lse[0].T[rows].to(acc)
        # Rows that see nothing are set below: PyTorch versions differ in what they return there.
        empty = empty_rows(table, q_THD.device)[:, None]
        # A row that sees a score of inf, or none but -inf, has no softmax: it becomes nan, and so
        # do its gradients. A row that sees nothing is left out, because its gradient must be 0 and
        # 0 times nan would reach dv.
        failed = torch.where(lse.isinf() & ~empty, torch.nan, 1.0)
        out, lse = out * failed.unsqueeze(-1), lse * failed
        return out.masked_fill(empty[:, None], 0.0), lse.masked_fill(empty, -torch.inf)


@functools.lru_cache(maxsize=64)  # one function for one softcap, because it is compiled
def _cap(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def check_inputs(q_THD: Tensor, v_SGD: Tensor) -> None:
    """Check what FlexAttention demands beyond attention.check_qkv."""
    if q_THD.dtype not in DTYPES:
        raise NotImplementedError(
            f"FlexAttention takes bf16, fp16 and fp32, got {q_THD.dtype}; cast the inputs or use "
            f"backend='reference'"
        )
    narrowest = min(q_THD.shape[2], v_SGD.shape[2])
    if narrowest < 16:
        raise NotImplementedError(
            f"FlexAttention needs head_dim 16 or more, got {narrowest}; pad the heads or use "
            f"backend='reference'"
        )


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
    wanted = {
        "recompile_limit": MOST_SHAPES,
        "cache_size_limit": MOST_SHAPES,  # the name in PyTorch 2.6
        "accumulated_recompile_limit": 8 * MOST_SHAPES,
        "accumulated_cache_size_limit": 8 * MOST_SHAPES,
        "fail_on_recompile_limit_hit": True,
        "fail_on_cache_limit_hit": True,
    }
    limits = {name: value for name, value in wanted.items() if hasattr(dynamo.config, name)}

    def call(*args: Any, **kwargs: Any) -> Any:
        with dynamo.config.patch(limits):
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                if "LimitHit" not in type(error).__name__:
                    raise
                raise NotImplementedError(
                    f"FlexAttention is compiled for at most {MOST_SHAPES} shapes, got one more; "
                    f"use fewer lengths of sequences, or a GPU that has our own kernels"
                ) from error

    return call


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
