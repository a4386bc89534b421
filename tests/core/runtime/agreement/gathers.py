"""Gathers of ranks that take turns in one process: real channels without a process group."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from megatron_magi.core.runtime.agreement.channel import Channel
from megatron_magi.core.runtime.agreement.stream import Streams


@dataclass
class Gloo:
    """Gathers of all ranks; the one with number i is over when every rank has started it."""

    num_ranks: int
    blocks: defaultdict[int, dict[int, torch.Tensor]] = field(
        default_factory=lambda: defaultdict(dict)
    )


@dataclass
class Group:
    """What a channel sees of it."""

    gloo: Gloo
    rank: int
    num_started: int = 0

    def _allgather_base(self, gathered: torch.Tensor, mine: torch.Tensor) -> Work:
        work = Work(self.gloo, self.num_started, gathered)
        self.gloo.blocks[self.num_started][self.rank] = mine.clone()
        self.num_started += 1
        return work


@dataclass
class Work:
    gloo: Gloo
    number: int
    gathered: torch.Tensor

    def is_completed(self) -> bool:
        return len(self.gloo.blocks[self.number]) == self.gloo.num_ranks

    def wait(self, _: timedelta) -> None:
        blocks = self.gloo.blocks[self.number]
        self.gathered[:] = torch.cat([blocks[rank] for rank in range(self.gloo.num_ranks)])


def channel_of(gloo: Gloo, rank: int) -> Channel:
    channel = Channel.__new__(Channel)
    channel.group = Group(gloo, rank)  # type: ignore[assignment]
    channel.streams, channel.timeout_s = Streams(gloo.num_ranks, rank), 1.0
    channel.pending, channel.free, channel.answers = deque(), [], False
    return channel
