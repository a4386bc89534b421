"""One rank's symmetric memory: slots for rows that its peers read, and flags between ranks.

Every rank of a group has the same buffer, and can address its peers' (PyTorch's symmetric memory).
A buffer holds the flags of all peers and then ``NUM_SLOTS`` slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.core.cuda.abi import PeerFlags

NUM_SLOTS = 2
"""One is filled while the peers read the other."""
FLAGS_BYTES = 4096
"""Bytes of a buffer before its slots: two int32 for each rank."""
ALIGNMENT = 1 << 20
"""The bytes of a slot are a multiple of this."""
READY, TAKEN = 0, 4
"""Byte offsets of a peer's two numbers in its part of the flags."""


class Shared(NamedTuple):
    """Memory of one rank that its peers can address."""

    buffer: Tensor
    handle: Any
    """Keeps the peers' memory mapped."""
    addresses: Sequence[int]
    """[ranks]: where this process sees each rank's buffer."""
    rank: int


def rendezvous(group: dist.ProcessGroup, device: torch.device, size: int) -> Shared:
    """A buffer of ``size`` bytes on every rank, whose flags are zero.

    Raises:
        RuntimeError: on every rank, if it fails on any.
    """
    with one_error(group):
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory as symm_mem

        # Not symm_mem.empty: newer versions keep its memory in a pool, which never returns it.
        buffer = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        buffer[:FLAGS_BYTES].zero_()
        torch.cuda.synchronize(device)  # no peer may see flags of an earlier use
    with one_error(group):
        handle: Any = symm_mem.rendezvous(buffer, group)
    offset = int(getattr(handle, "offset", 0))
    addresses = [int(base) + offset for base in handle.buffer_ptrs]
    return Shared(buffer, handle, addresses, dist.get_rank(group))


class SymmetricMemory:
    """A group's buffers, as one rank sees them; see ``MagiPeerFlags`` in csrc for the flags."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slot_bytes: int) -> None:
        """All ranks of the group create it together, with equal arguments.

        Raises:
            RuntimeError: the ranks' GPUs cannot address each other's memory, or have too little.
        """
        self.slot_bytes = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
        with torch.inference_mode(False):  # training may follow an evaluation that opened it
            shared = rendezvous(group, device, FLAGS_BYTES + NUM_SLOTS * self.slot_bytes)
        self.buffer, self._handle, bases_by_rank, rank = shared
        # Peers in turn, beginning after this rank: no two ranks begin with one peer.
        self.rank, size = rank, len(bases_by_rank)
        self.peers = [(rank + i) % size for i in range(1, size)]
        bases = [bases_by_rank[peer] for peer in self.peers]
        self.flags = self._flags(bases)
        self.peer_slots = [
            [base + FLAGS_BYTES + slot * self.slot_bytes for base in bases]
            for slot in range(NUM_SLOTS)
        ]
        """[slot][peer]: addresses."""
        here = self.buffer.data_ptr() + FLAGS_BYTES
        self.addresses = [here + slot * self.slot_bytes for slot in range(NUM_SLOTS)]
        """This rank's slots."""
        with torch.inference_mode(False):
            slots = self.buffer[FLAGS_BYTES:].view(NUM_SLOTS, self.slot_bytes)
            dtypes = (torch.bfloat16, torch.float16, torch.float32)
            self.slots = [{dtype: row.view(dtype) for dtype in dtypes} for row in slots]

    def _flags(self, bases: Sequence[int]) -> ctypes.Array[PeerFlags]:
        here, rank = self.buffer.data_ptr(), self.rank
        made = (PeerFlags * len(bases))()
        for flags, base, peer in zip(made, bases, self.peers, strict=True):
            flags.ready_there = base + 8 * rank + READY
            flags.ready_here = here + 8 * peer + READY
            flags.taken_there = base + 8 * rank + TAKEN
            flags.taken_here = here + 8 * peer + TAKEN
        return made

    def numbers(self) -> dict[int, tuple[int, int]]:
        """For reports: by peer, the number of the last exchange that it was ready for, and of the
        last one whose rows it took.

        The host waits for a small copy, on another stream than the one that may be stuck. The
        device is set, because a thread's first device is GPU 0, on which leaving the stream would
        create a context.
        """
        device = self.buffer.device
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            flags = self.buffer[:FLAGS_BYTES].view(torch.int32).cpu().tolist()
        return {peer: (flags[2 * peer], flags[2 * peer + 1]) for peer in self.peers}


@contextmanager
def one_error(group: dist.ProcessGroup) -> Iterator[None]:
    """If the block fails on any rank of the group, it raises RuntimeError on every rank.

    Cost: the host waits for all ranks at the end of the block.
    """
    error: str | None = None
    try:
        yield
    except Exception as raised:  # PyTorch versions differ in what they raise, or lack
        error = f"{type(raised).__name__}: {raised}"
    errors: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    failed = [f"rank {i}: {text}" for i, text in enumerate(errors) if text is not None]
    if failed:
        raise RuntimeError("; ".join(failed))


def view_of(slot: Tensor, num_rows: int, columns: int) -> Tensor:
    """The first rows of a slot, [num_rows, columns]."""
    return slot.as_strided((num_rows, columns), (columns, 1))
