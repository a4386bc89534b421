"""Inputs of the loop over stages: the plan's tables, the transport, the kernel, and a prefetcher of
keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.core.comm.group_cast import PendingCast
from megatron_magi.core.comm.hierarchical import PendingNodeCast, cast_rows
from megatron_magi.core.comm.transport import Transport
from megatron_magi.core.kernel.backend import AttnBackend
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.runtime.prepared import PreparedPlan, PreparedStage
from megatron_magi.core.runtime.saved_kv import SavedKV


class Qkv(NamedTuple):
    """Inputs of attention, see ``dist_attn``."""

    q: Tensor
    k: Tensor
    v: Tensor


class OutGrads(NamedTuple):
    """Gradients that a backward starts from."""

    dout: Tensor
    """[T, H, E] gradient of out."""
    delta: Tensor | None
    """[T, H] row sums of dout * out, less the gradient of lse; None: not computed yet."""


class StageContext(NamedTuple):
    """Inputs of the loop over stages besides q, k, v and the gradients."""

    plan: AttnPlan
    ready: PreparedPlan
    group: dist.ProcessGroup | None
    transport: Transport
    backend: AttnBackend
    softmax_scale: float
    softcap: float
    wire_dtype: torch.dtype
    """The dtype in which partial gradients are sent to their owners."""
    max_logits: Tensor | None
    """See AttnCall; None: not asked for."""
    keeps: bool
    """True if the forward keeps the keys and values that it receives for a backward."""


class KVPrefetcher:
    """Iterates over stages with their keys and values, and fetches those of the next stage while a
    stage computes. The first fetch begins when the object is created."""

    def __init__(
        self, work: StageContext, stages: Sequence[PreparedStage], k: Tensor, v: Tensor,
        kept: SavedKV | None = None,
    ) -> None:  # fmt: skip
        """``kept``: received rows that a forward has kept; then nothing is fetched."""
        self.work, self.stages, self.k, self.v, self.kept = work, stages, k, v, kept
        self.buffers: list[Tensor] = []
        """The key buffers of the stages so far that received rows, if the forward keeps them."""
        self.on_fetch: Callable[[], None] = lambda: None
        """Called when the next stage's fetch has begun, before this stage's rows are waited for."""
        self.in_flight = self._fetch(0)
        self.keepalive: PendingCast | PendingNodeCast | None = None
        """The first fetch, if stages run on the side stream. It keeps the buffer, which belongs to
        the stream that began the fetch, until the backward ends."""

    def _fetch(self, i: int) -> PendingCast | PendingNodeCast | None:
        if i == len(self.stages) or self.kept or (cast := self.stages[i].cast) is None:
            return None
        return cast_rows((self.k, self.v), cast, self.work.transport)

    def __iter__(self) -> Iterator[tuple[PreparedStage, Tensor, Tensor]]:
        """(stage, keys, values): own rows, received rows, or own and then received ones.

        Two stages' buffers are alive if the caller drops one before it asks for the next.
        """
        for i, stage in enumerate(self.stages):
            arriving, self.in_flight = self.in_flight, self._fetch(i + 1)
            self.on_fetch()
            if arriving is not None:
                pair = arriving.wait()
                if self.work.keeps and self.kept is None:
                    self.buffers.append(arriving.buffer)
            elif stage.cast is None:
                pair = self.k, self.v
            else:
                assert self.kept is not None
                pair = self.kept.of(stage)
            del arriving
            yield stage, pair[0], pair[1]
            del pair
