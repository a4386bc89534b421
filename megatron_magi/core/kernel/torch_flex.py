"""PyTorch's FlexAttention behind the AttnBackend protocol, for GPUs without our own kernels.

The block mask is built directly from the slices, without a dense mask; the test inside a block uses
the intervals of keys that a row sees. This backend is slower than the CUDA backend. It runs if it
is chosen explicitly or the GPU is not a Hopper, and ``select_backend`` logs the choice.
Shapes: T query tokens, S key tokens, H query heads, G key/value heads, D head_dim (values and
their output may have another one), R intervals.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
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
from megatron_magi.core.kernel.merge import merge_
from megatron_magi.core.kernel.slice_table import SliceTable

BLOCK = 128
"""Side of a block of the block mask, FlexAttention's default."""

MAX_INTERVALS = 32
"""Limit of slices that meet one row: each costs two comparisons per cell of a partial block."""

MOST_SHAPES = 128
"""Limit of compiled shapes. PyTorch's own limit is 8, after which it silently runs uncompiled."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FlexBackend:
    """Forward and backward by FlexAttention, compiled on GPUs and eager on the CPU (tests).

    A stage's backward recomputes its forward: FlexAttention's backward needs the stage's own out
    and lse, while the protocol passes the final lse only.
    """

    name = "flex"
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
            NotImplementedError: a dtype, head_dim or mask that FlexAttention cannot take.
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
        empty = row_intervals(table, q_THD.device)[2][:, None]
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


def rounded(count: int) -> int:
    """``count`` rounded up to one of eight lengths between powers of two, to compile for few."""
    step = max(BLOCK, 1 << max(count.bit_length() - 4, 0))
    return -(-count // step) * step


def _without_warnings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Silence the warning that the eager CPU form is slow: it is for tests."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)

    return call


def row_intervals(table: SliceTable, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(first [R, T], last [R, T], empty [T]): row q sees keys first[r, q] <= k < last[r, q].

    R is a power of two.

    Raises:
        NotImplementedError: more than MAX_INTERVALS slices meet one row.
    """
    key = ("flex intervals", device)
    if key not in table.cache:
        first, last = _intervals(table.slices, table.num_q)
        empty = (last <= first).all(0)
        with torch.inference_mode(False):  # later calls may save them for backward
            table.cache[key] = tuple(torch.from_numpy(x).to(device) for x in (first, last, empty))
    return table.cache[key]


def _intervals(
    slices: npt.NDArray[np.int32], num_q: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    count = np.zeros(num_q, dtype=np.int64)
    for q0, q1, *_ in slices.tolist():
        count[q0:q1] += 1
    needed = int(count.max(initial=0))
    if needed > MAX_INTERVALS:
        raise NotImplementedError(
            f"the flex backend takes up to {MAX_INTERVALS} slices that meet one query row, got "
            f"{needed}; merge slices or use backend='reference'"
        )
    power_of_two = 1 << max(needed - 1, 0).bit_length()  # so that few variants are compiled
    first = np.zeros((power_of_two, num_q), dtype=np.int32)
    last = np.zeros_like(first)
    count[:] = 0
    for q0, q1, k0, k1, d_lo, d_hi in slices.tolist():
        rows = np.arange(q0, q1)
        first[count[q0:q1], rows] = np.maximum(k0, rows + d_lo)
        last[count[q0:q1], rows] = np.minimum(k1, rows + d_hi + 1)
        count[q0:q1] += 1
    return first, last


def block_mask(table: SliceTable, device: torch.device) -> Any:
    """FlexAttention's BlockMask of the table, built once per device."""
    key = ("flex block mask", device)
    if key not in table.cache:
        with torch.inference_mode(False):
            table.cache[key] = _make_block_mask(table, device)
    return table.cache[key]


def _make_block_mask(table: SliceTable, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    num_q, num_k = rounded(table.num_q), rounded(table.num_k)
    more = (0, num_q - table.num_q)
    first, last = (torch.nn.functional.pad(x, more) for x in row_intervals(table, device)[:2])
    num_intervals = first.shape[0]

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k >= first[0, q]) & (k < last[0, q])
        for r in range(1, num_intervals):
            seen = seen | ((k >= first[r, q]) & (k < last[r, q]))
        return seen

    partial, full = (in_blocks(x, num_q, num_k) for x in block_kinds(table))
    return BlockMask.from_kv_blocks(
        *_block_lists(partial, device),
        *_block_lists(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(num_q, num_k),
    )


def block_kinds(table: SliceTable) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(partial, full), bool [q blocks, k blocks] each: blocks with some visible cells, and blocks
    that one slice covers completely."""
    num_q, num_k = -(-table.num_q // BLOCK), -(-table.num_k // BLOCK)
    some = np.zeros((num_q, num_k), dtype=np.bool_)
    full = np.zeros_like(some)
    for q0, q1, k0, k1, d_lo, d_hi in table.slices.tolist():
        rows = slice(q0 // BLOCK, -(-q1 // BLOCK))
        keys = slice(k0 // BLOCK, -(-k1 // BLOCK))
        q = np.arange(num_q)[rows, None] * BLOCK
        k = np.arange(num_k)[None, keys] * BLOCK
        q_first, q_last = np.maximum(q, q0), np.minimum(q + BLOCK, q1) - 1
        k_first, k_last = np.maximum(k, k0), np.minimum(k + BLOCK, k1) - 1
        some[rows, keys] |= (k_last - q_first >= d_lo) & (k_first - q_last <= d_hi)
        inside = (q >= q0) & (q + BLOCK <= q1) & (k >= k0) & (k + BLOCK <= k1)
        full[rows, keys] |= inside & (k_first - q_last >= d_lo) & (k_last - q_first <= d_hi)
    return some & ~full, full


def in_blocks(blocks: npt.NDArray[np.bool_], num_q: int, num_k: int) -> npt.NDArray[np.bool_]:
    """``blocks`` padded with empty blocks up to these lengths."""
    more = num_q // BLOCK - blocks.shape[0], num_k // BLOCK - blocks.shape[1]
    return np.pad(blocks, ((0, more[0]), (0, more[1])))


def _block_lists(blocks: npt.NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Per q block, the number of its k blocks, int32 [1, 1, q blocks], and all k blocks, its own
    first, int32 [1, 1, q blocks, k blocks]."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    counts = blocks.sum(1).astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(order)[None, None].to(
        device
    )
