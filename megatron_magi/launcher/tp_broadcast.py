"""Lists of integers from the first tensor-parallel rank, which alone has samples, to the others."""

from __future__ import annotations

from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.core.comm.process_group import rendezvous_store


class TensorRanks:
    """A gloo group of the tensor-parallel ranks: over NCCL the host would wait for the device."""

    def __init__(self, parent: dist.ProcessGroup, timeout_s: float) -> None:
        """All ranks of ``parent`` open one at about the same time."""
        self.rank = dist.get_rank(parent)
        size, timeout = dist.get_world_size(parent), timedelta(seconds=timeout_s)
        store = rendezvous_store(parent, "samples")
        self._group: Any = dist.ProcessGroupGloo(store, self.rank, size, timeout)

    def share(self, lists: list[list[int]]) -> list[list[int]]:
        """The first rank's lists, on every rank; all ranks call it.

        Cost: two broadcasts between hosts.
        """
        flat = [len(lists), *map(len, lists), *(number for each in lists for number in each)]
        size = int(self._broadcast(torch.tensor([len(flat)], device="cpu")))
        numbers = torch.tensor(flat if self.rank == 0 else [0] * size, device="cpu")
        num_lists, *rest = self._broadcast(numbers).tolist()
        values = iter(rest[num_lists:])
        return [list(islice(values, length)) for length in rest[:num_lists]]

    def _broadcast(self, numbers: Tensor) -> Tensor:
        self._group.broadcast(numbers, 0).wait()
        return numbers
