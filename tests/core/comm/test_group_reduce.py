"""Sums of partial gradients: their bits, and what they keep alive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_magi.core.comm import rows as row_moves
from megatron_magi.core.comm.group_reduce import PendingReduce, add_partials
from megatron_magi.core.comm.row_buffer import concat_buffer
from tests.core.comm.cast_cases import casts
from tests.core.kernel import abi_on_cpu


def test_sums_without_arrivals_keep_nothing_else_alive() -> None:
    buffer = torch.arange(24.0).view(6, 4)
    part, whole = buffer[:2], torch.ones(2, 4)
    got_part, got_whole = add_partials((part, whole), [], torch.float32)
    assert torch.equal(got_part, part) and got_part.untyped_storage().nbytes() == 2 * 4 * 4
    assert got_whole.data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("width", [64, 128], ids=lambda width: f"values of {width}")
@pytest.mark.parametrize("received", [torch.float32, torch.bfloat16])
def test_partials_are_added(
    received: torch.dtype, width: int, library: abi_on_cpu.CpuLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The bits of PyTorch's way, which goes peer by peer."""
    ready = sorted(casts("staged"), key=lambda cast: cast.num_sent)[-2:]
    own = [torch.randn(60, 2, d) for d in (64, width)]
    shapes = tuple(x.shape[1:] for x in own)
    buffers = [concat_buffer(own[0], cast.num_sent, shapes, received).normal_() for cast in ready]

    def sums() -> list[Tensor]:
        pairs = zip(buffers, ready, strict=True)
        arriving = [PendingReduce(None, buffer, shapes, cast) for buffer, cast in pairs]
        return add_partials([x.clone() for x in own], arriving, torch.bfloat16)

    got = sums()
    assert set(library.calls) == {"magi_add_rows"}
    monkeypatch.setattr(row_moves, "loaded_cuda_library", lambda device: None)
    assert all(map(torch.equal, got, sums()))
    assert ready[0].num_sent and got[0].dtype == torch.bfloat16
