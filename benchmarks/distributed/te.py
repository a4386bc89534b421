"""TransformerEngine's context parallelism in the distributed benchmark: p2p, all_gather and a2a.

The kernel, cuDNN's or FlashAttention-3, is chosen for the whole program, because TransformerEngine
reads its choice from the environment. One document runs in the form that Megatron gives it (sbhd),
several run packed (thd). Packed documents are padded to a multiple of twice the ranks, as
TransformerEngine requires; padding counts as tokens there, which is its fastest way and is right
for causal masks alone, since no row sees the padding behind it.

T rows of this rank (padding included), S of the sequence, H query heads, G key/value heads,
D head_dim.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.distributed.calls import CannotRun, Grads, Problem, gather
from benchmarks.distributed.sequences import window_of
from benchmarks.distributed.zigzag import ZigzagLayout
from megatron_magi import AttnMask
from megatron_magi.core.kernel.backend import OutLse
from megatron_magi.viz.document_zigzag import DocumentZigzag

Int64Array = npt.NDArray[np.int64]
METHODS = r"te_(cudnn|fa3)_(p2p|all_gather|a2a)"
KERNELS = {
    "cudnn": {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0"},
    "fa3": {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "1", "NVTE_FLASH_ATTN_V2": "0"},
}
"""What TransformerEngine reads for each kernel."""


def engine_kernels(impls: list[str]) -> set[str]:
    """Those that TransformerEngine's methods among these implementations name."""
    return {match[1] for name in impls if (match := re.fullmatch(METHODS, name))}


def choose_kernel(impls: list[str]) -> None:
    """Set the variables of the kernel that these implementations name, if any does; one at most."""
    for kernel in engine_kernels(impls):
        os.environ.update({**KERNELS[kernel], "NVTE_UNFUSED_ATTN": "0"})


def missing_engine() -> str | None:
    """Why TransformerEngine is not there."""
    found = importlib.util.find_spec("transformer_engine") is not None
    return None if found else "transformer_engine cannot be imported"


class TransformerEngine:
    """One of its methods, forward and backward through autograd as its layers call it."""

    def __init__(self, x: Problem, name: str) -> None:
        """Runs the method once.

        Args:
            x: the problem, equal on every rank.
            name: matches METHODS.

        Raises:
            CannotRun: the method does not take the mask; says why.
        """
        ranks = dist.get_world_size()
        self.layout = ZigzagLayout.of(x.mask, ranks)
        self.rule = Rule.of(x.mask, self.layout.padding_tokens)
        self.leaves = [self._local(t).requires_grad_() for t in (x.q, x.k, x.v)]
        self.dout = self._local(x.dout)
        self.arguments = self.rule.arguments(x.q.device)
        self.attention = self._attention(x, name.removeprefix("te_").partition("_")[2])
        self.out: Tensor | None = None
        try:
            self.before_backward()
            self.backward()
        except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
            raise CannotRun(f"TransformerEngine: {_first_line(error)}") from error

    def forward(self) -> OutLse:
        with torch.no_grad():
            out = self._run()
        return out, out  # it returns no lse

    def before_backward(self) -> None:
        """A forward that keeps what one backward needs: its graph can be walked once."""
        self.out = self._run()

    def backward(self) -> Grads:
        assert self.out is not None, "before_backward comes first"
        out, self.out = self.out, None
        dq, dk, dv = torch.autograd.grad(out, self.leaves, self.dout.view_as(out))
        return dq, dk, dv

    def full(self) -> tuple[Tensor, ...]:
        order = torch.from_numpy(self.layout.natural_order()).to(self.dout.device)
        real = order[: self.layout.num_rows]
        self.before_backward()
        assert self.out is not None
        parts = [self.out.detach().view_as(self.dout), *self.backward()]
        rows = [t if self.rule.is_packed else t.squeeze(1) for t in parts]
        return tuple(gather(t.contiguous()).index_select(0, real) for t in rows)

    def _run(self) -> Tensor:
        out: Tensor = self.attention(*self.leaves, **self.arguments)
        return out

    def _attention(self, x: Problem, method: str) -> Any:
        import transformer_engine.pytorch as te

        heads = x.heads
        attention = te.DotProductAttention(
            heads.num_heads_q,
            heads.head_dim,
            num_gqa_groups=heads.num_heads_kv,
            qkv_format="thd" if self.rule.is_packed else "sbhd",
            attn_mask_type=self.rule.mask_type,
            layer_number=1,
        )
        ranks = list(range(dist.get_world_size()))
        attention.set_context_parallel_group(dist.group.WORLD, ranks, torch.cuda.Stream(), method)
        return attention

    def _local(self, x: Tensor) -> Tensor:
        """This rank's rows, [T, H, D] packed, [T, 1, H, D] otherwise; padding is 0."""
        local = self.layout.local(x, dist.get_rank())
        return local if self.rule.is_packed else local.unsqueeze(1)


@dataclass(frozen=True)
class Rule:
    """A mask in TransformerEngine's words."""

    lengths: Int64Array
    """int64 [documents]: rows of every document, padding included."""
    is_causal: bool
    """Whether rows see no key behind them; otherwise they see their whole document."""
    window: int
    """Keys to its left that a row sees, -1: all of its document."""

    @classmethod
    def of(cls, mask: AttnMask, padding_tokens: int) -> Rule:
        """The rule of a mask, whose layout has this much padding.

        Raises:
            CannotRun: there is none.
        """
        ranks = dist.get_world_size()
        documents = DocumentZigzag.of(mask, ranks)
        if documents is None:
            raise CannotRun("TransformerEngine takes packed documents alone under CP")
        is_causal = not (documents.reach[:, 1] > 0).any()
        if padding_tokens and not is_causal:
            raise CannotRun("these documents need padding, which their rows would see")
        return cls(documents.piece_sizes * 2 * ranks, is_causal, window_of(mask))

    @property
    def is_packed(self) -> bool:
        """Whether there are several documents."""
        return len(self.lengths) > 1

    @property
    def mask_type(self) -> str:
        """TransformerEngine's name."""
        if self.is_packed:
            return "padding_causal" if self.is_causal else "padding"
        return "causal" if self.is_causal else "no_mask"

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Arguments of a call besides queries, keys and values."""
        window = {"window_size": (self.window, 0)} if self.window >= 0 else {}
        if not self.is_packed:
            return window
        edges = torch.tensor([0, *np.cumsum(self.lengths)], dtype=torch.int32, device=device)
        longest = int(self.lengths.max())
        sides = {
            f"cu_seqlens_{side}{end}": edges for side in ("q", "kv") for end in ("", "_padded")
        }
        return {**window, **sides, "max_seqlen_q": longest, "max_seqlen_kv": longest}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
