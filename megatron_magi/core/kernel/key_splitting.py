"""A backend whose kernels take few slices in a row: FlexAttention and FlashAttention-4.

``slice_parts`` cuts a call, and the parts are merged as the stages of distributed attention are.
Shapes: T query tokens, H query heads, E head_dim of values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from megatron_magi.core.kernel.backend import (
    AttnCall,
    GradCall,
    Gradients,
    OutLse,
    StatelessBackend,
    acc_dtype,
    copy_grads_,
    final_delta,
    row_delta,
    scatter_rows_,
)
from megatron_magi.core.kernel.flex_block_mask import empty_rows
from megatron_magi.core.kernel.merge import merge_
from megatron_magi.core.kernel.sink import check_joins, join_sink_
from megatron_magi.core.kernel.split_slices import Part, slice_parts


class InParts(StatelessBackend, ABC):
    """Forward and backward of a call from those of its parts, which a subclass computes."""

    name: str
    adds_atomically = False
    finds_max_logits = False
    delta = staticmethod(row_delta)

    def check(self, call: AttnCall) -> None:
        """Raise NotImplementedError for a call that the kernels do not take."""
        if call.max_logits is not None:
            raise NotImplementedError(
                f"the largest logits require the kernel 'cuda' (Hopper) or 'reference', got "
                f"{self.name!r}, which does not keep them; bound the scores by the norms of q and "
                f"k rows"
            )

    @abstractmethod
    def attend(self, part: Part) -> OutLse:
        """(out [T, H, E] in the dtype of q, lse [T, H] in the accumulation dtype) of one part; 0
        and -inf for rows that see nothing."""

    @abstractmethod
    def part_gradients(self, part: Part, grad: GradCall) -> tuple[Tensor, ...]:
        """(dq, dk, dv) of one part in the dtype of q; ``grad`` has delta and not out."""

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
            NotImplementedError: see ``check``.
        """
        self.check(call)
        check_joins(call, prev)
        out, lse = join_sink_(*self._merged(call), call)
        if into is not None:
            return scatter_rows_((out, lse), call.table, into)
        if prev is None:
            return out.to(out_dtype or call.q.dtype), lse
        merge_(*prev, out.to(prev[0].dtype), lse)
        return prev

    def backward(self, call: AttnCall, grad: GradCall) -> Gradients:
        """See AttnBackend; it raises the same errors as ``forward``."""
        self.check(call)
        acc = acc_dtype(call.q.dtype)
        wanted = grad.dtype or acc
        grad = grad._replace(delta=final_delta(grad, acc), out=None)
        first, *others = slice_parts(call)
        total = self.part_gradients(first, grad)
        for part in others:
            more = self.part_gradients(part, grad)
            total = tuple(x.to(acc).add_(y) for x, y in zip(total, more, strict=True))
        dq, dk, dv = (x.to(wanted) for x in total)
        return dq if grad.dq is None else grad.dq.add_(dq), *copy_grads_((dk, dv), grad.dkv)

    def _merged(self, call: AttnCall) -> OutLse:
        """out, in the dtype of q for one part without sinks and else in that of lse, and lse.

        A row that sees a score of inf, or only scores of -inf, has no softmax: it becomes nan. A
        row whose scores in one part are all -inf counts as empty in that part.
        """
        first, *others = slice_parts(call)
        out, lse = self.attend(first)
        out = out.contiguous()
        if others or call.sink_lse is not None:
            out = out.to(acc_dtype(out.dtype))
        if others:
            out.masked_fill_(lse.isneginf().unsqueeze(-1), 0.0)
        for part in others:
            more, more_lse = self.attend(part)
            more = more.masked_fill(more_lse.isneginf().unsqueeze(-1), 0.0)
            merge_(out, lse, more.to(out.dtype), more_lse)
        empty = empty_rows(call.table, lse.device)
        failed = lse.isinf() if empty is None else lse.isinf() & ~empty
        return out.masked_fill_(failed[..., None], torch.nan), lse.masked_fill_(failed, torch.nan)
