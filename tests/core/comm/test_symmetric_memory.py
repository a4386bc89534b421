"""One rank's view of symmetric memory, and errors that all ranks get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_magi.core.comm import symmetric_memory
from megatron_magi.core.comm.symmetric_memory import (
    ALIGNMENT,
    FLAGS_BYTES,
    NUM_SLOTS,
    Shared,
    SymmetricMemory,
    one_error,
    view_of,
)
from tests.process_pool import pool

CPU = torch.device("cpu")


def views(count: int, slot_bytes: int, monkeypatch: pytest.MonkeyPatch) -> list[SymmetricMemory]:
    """Every rank's, over buffers of this process."""
    slot = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
    buffers = [torch.zeros(FLAGS_BYTES + NUM_SLOTS * slot, dtype=torch.uint8) for _ in range(count)]
    addresses = [buffer.data_ptr() for buffer in buffers]

    def shared(group: Any, device: torch.device, size: int) -> Shared:
        assert size == len(buffers[group])
        return Shared(buffers[group], None, addresses, group)

    monkeypatch.setattr(symmetric_memory, "rendezvous", shared)
    return [SymmetricMemory(rank, CPU, slot_bytes) for rank in range(count)]  # type: ignore[arg-type]


def test_there_and_here_are_one_place_seen_from_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = views(4, ALIGNMENT + 1, monkeypatch)
    places = set()
    for me, memory in enumerate(ranks):
        assert memory.slot_bytes == 2 * ALIGNMENT
        assert memory.peers == [(me + i) % 4 for i in (1, 2, 3)]
        for flags, peer in zip(memory.flags, memory.peers, strict=True):
            back = ranks[peer].flags[ranks[peer].peers.index(me)]
            assert flags.ready_there == back.ready_here
            assert flags.taken_there == back.taken_here
            places |= {flags.ready_there, flags.taken_there}
            for slot in range(NUM_SLOTS):
                seen = memory.peer_slots[slot][memory.peers.index(peer)]
                assert seen == ranks[peer].addresses[slot]
    assert len(places) == 4 * 3 * 2
    first = ranks[0].buffer.data_ptr()
    mine = {place - first for place in places if 0 <= place - first < FLAGS_BYTES}
    assert len(mine) == 6, "a rank's own flags lie before its slots"


def test_rows_of_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, _ = views(2, 4096, monkeypatch)
    for number, slot in enumerate(memory.slots):
        rows = view_of(slot[torch.bfloat16], 3, 8)
        assert rows.shape == (3, 8) and rows.is_contiguous() and rows.dtype == torch.bfloat16
        assert rows.data_ptr() == memory.addresses[number]


def failing(rank: int) -> str:
    try:
        with one_error(dist.group.WORLD):
            if rank == 1:
                raise TypeError("no such function")
    except RuntimeError as error:
        return str(error)
    return "no error"


def passing(rank: int) -> str:
    with one_error(dist.group.WORLD):
        return "done"


def test_a_failure_of_one_rank_is_every_ranks() -> None:
    ranks = pool(2, "gloo")
    assert ranks.run(failing) == ["rank 1: TypeError: no such function"] * 2
    assert ranks.run(passing) == ["done"] * 2
