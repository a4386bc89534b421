"""What an exchange asks of the kernels that move and add rows, computed from the structs alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_magi.core.comm import rows as row_moves
from megatron_magi.core.comm.group_cast import rows_beside
from megatron_magi.core.comm.group_reduce import PendingReduce, sum_at_home
from megatron_magi.core.comm.rows import gather_rows
from tests.core.comm.cast_cases import casts
from tests.core.kernel import abi_on_cpu

GATHER, ADD = "magi_gather_rows", "magi_add_rows"


@pytest.mark.parametrize("width", [64, 128], ids=lambda width: f"values of {width}")
@pytest.mark.parametrize("received", [torch.float32, torch.bfloat16])
def test_sums_at_home(
    received: torch.dtype, width: int, library: abi_on_cpu.CpuLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The bits of PyTorch's way, which goes peer by peer."""
    ready = sorted(casts("staged"), key=lambda cast: cast.num_sent)[-2:]
    own = [torch.randn(60, 2, d) for d in (64, width)]
    shapes = tuple(x.shape[1:] for x in own)
    buffers = [rows_beside(own[0], cast.num_sent, shapes, received).normal_() for cast in ready]

    def sums() -> list[Tensor]:
        pairs = zip(buffers, ready, strict=True)
        arriving = [PendingReduce(None, buffer, shapes, cast) for buffer, cast in pairs]
        return sum_at_home([x.clone() for x in own], arriving, torch.bfloat16)

    got = sums()
    assert set(library.calls) == {ADD}
    monkeypatch.setattr(row_moves, "loaded_cuda_library", lambda device: None)
    assert all(map(torch.equal, got, sums()))
    assert ready[0].num_sent and got[0].dtype == torch.bfloat16


def test_only_the_rows_that_were_asked_for(library: abi_on_cpu.CpuLibrary) -> None:
    x, target = torch.randn(9, 2, 8), torch.zeros(12, 2, 8)
    for index, want in ((torch.tensor([4, 0, 4], dtype=torch.int32), [4, 0, 4]), (None, range(9))):
        gather_rows([x], index, [target.zero_()], len(want))
        assert torch.equal(target[: len(want)], x[list(want)]) and not target[len(want) :].any()
    assert library.calls == [GATHER] * 2
