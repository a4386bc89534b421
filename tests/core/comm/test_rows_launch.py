"""What an exchange asks of the kernels that move and add rows, computed from the structs alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from megatron_magi import HeadShape
from megatron_magi.core.comm import rows as row_moves
from megatron_magi.core.comm.group_cast import PendingCast, rows_beside, split_columns
from megatron_magi.core.comm.group_reduce import PendingReduce, sum_at_home
from megatron_magi.core.comm.prepared_cast import PreparedCast, prepare_casts
from megatron_magi.core.comm.rows import gather_rows
from megatron_magi.core.plan import make_attn_plan
from tests.core.kernel import abi_on_cpu
from tests.dense import random_mask
from tests.knobs import magi_config

GATHER, ADD = "magi_gather_rows", "magi_add_rows"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[abi_on_cpu.CpuLibrary]:
    made = abi_on_cpu.CpuLibrary()
    monkeypatch.setattr(row_moves, "loaded_cuda_library", lambda device: made)
    monkeypatch.setattr(row_moves, "stream_handle", lambda device: 7)
    monkeypatch.setattr(row_moves, "on_device", lambda device: nullcontext())
    yield made


def casts(mode: str, num_rows: int = 60) -> list[PreparedCast]:
    """Of three ranks; forward and backward."""
    config = magi_config(overlap_degree=2, forward_mode=mode)
    plan = make_attn_plan(random_mask(3, 180, 180), 3, HeadShape(2, 2, 64), config)
    assert plan.layout.num_local_tokens == num_rows
    views = [plan.rank_plan(rank) for rank in range(3)]
    stages = [s for view in views for s in (*view.forward_stages, *view.stages)]
    wanted = [s.cast for s in stages if s.cast is not None]
    return prepare_casts(wanted, torch.device("cpu"))


def index_of(cast: PreparedCast, name: str) -> list[int]:
    table = getattr(cast, name)
    return list(range(cast.num_own)) if table is None else table.here().tolist()


@pytest.mark.parametrize("mode", ["at_once", "local_first", "staged"])
@pytest.mark.parametrize("width", [64, 128], ids=lambda width: f"values of {width}")
def test_a_cast(mode: str, width: int, library: abi_on_cpu.CpuLibrary) -> None:
    """What is sent, and the own rows in front of what is received, which stays."""
    xs = [torch.randn(60, 2, d).bfloat16() for d in (64, width)]
    shapes = [x.shape[1:] for x in xs]
    for cast in casts(mode):
        send = split_columns(rows_beside(xs[0], cast.num_sent, shapes), shapes)
        gather_rows(xs, cast.send.here(), send)
        buffer = rows_beside(xs[0], cast.num_own + cast.num_recv, shapes).fill_(7)
        keys = PendingCast(None, xs, shapes, buffer, cast).wait()
        for x, sent, key in zip(xs, send, keys, strict=True):
            assert torch.equal(sent, x[index_of(cast, "send")])
            assert torch.equal(key[: cast.num_own], x[index_of(cast, "own")])
            assert (key[cast.num_own :] == 7).all()
    assert set(library.calls) == {GATHER}


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
