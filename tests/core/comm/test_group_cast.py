"""Rows laid side by side, sent as bytes, and own rows in front of what is received."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.core.comm.group_cast import PendingCast, group_cast
from megatron_magi.core.comm.prepared_cast import PreparedCast, prepare_casts
from megatron_magi.core.comm.row_buffer import concat_buffer, split_columns
from megatron_magi.core.comm.rows import gather_rows
from megatron_magi.core.comm.transport import AllToAll, PendingSend
from megatron_magi.core.plan import GroupCastPlan
from tests.core.comm.cast_cases import casts, index_of
from tests.core.kernel import abi_on_cpu

GATHER = "magi_gather_rows"
CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", ["at_once", "local_first", "staged"])
@pytest.mark.parametrize("width", [64, 128], ids=lambda width: f"values of {width}")
def test_a_cast(mode: str, width: int, library: abi_on_cpu.CpuLibrary) -> None:
    """What is sent, and the own rows in front of what is received, which stays."""
    xs = [torch.randn(60, 2, d).bfloat16() for d in (64, width)]
    shapes = [x.shape[1:] for x in xs]
    for cast in casts(mode):
        send = split_columns(concat_buffer(xs[0], cast.num_sent, shapes), shapes)
        gather_rows(xs, cast.send.here(), send)
        buffer = concat_buffer(xs[0], cast.num_own + cast.num_recv, shapes).fill_(7)
        keys = PendingCast(PendingSend(buffer, None), xs, shapes, buffer, cast).wait()
        for x, sent, key in zip(xs, send, keys, strict=True):
            assert torch.equal(sent, x[index_of(cast, "send")])
            assert torch.equal(key[: cast.num_own], x[index_of(cast, "own")])
            assert (key[cast.num_own :] == 7).all()
    assert set(library.calls) == {GATHER}


def ranges(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int32).reshape(-1, 2)


def first_of_two(own: np.ndarray) -> PreparedCast:
    """Of 6 rows this rank sends 1, 2 and 5 to the second one, and receives two."""
    plan = GroupCastPlan(ranges((1, 3), (5, 6)), (0, 3), (0, 2), ranges((6, 8)), own, 6)
    (made,) = prepare_casts([plan], CPU)
    assert isinstance(made, PreparedCast)
    return made


class Wire:
    """In place of the all-to-all: what was sent, and how rows arrive when they are waited for."""

    def __init__(self, arriving: Tensor) -> None:
        self.arriving = arriving

    def __call__(
        self, recv: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int],
        group: object, async_op: bool,
    ) -> Wire:  # fmt: skip
        assert recv.dtype == send.dtype == torch.uint8 and async_op
        self.counts, self.group = (send_counts, recv_counts), group
        self.sent, self.recv = send.clone(), recv
        return self

    def wait(self) -> None:
        if self.arriving.numel():
            self.recv.copy_(self.arriving.view(torch.uint8))


@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("own", [(), ((0, 2), (4, 5)), ((0, 6),)], ids=["none", "some", "all"])
def test_own_rows_come_before_received_ones(
    own: tuple[tuple[int, int], ...], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of 2 heads in one message; the caller's room is behind them."""
    k, v = torch.randn(6, 2, 3).bfloat16(), torch.randn(6, 2, 1).bfloat16()
    arriving = torch.randn(2, 8).bfloat16()
    wire, cast, group = Wire(arriving), first_of_two(ranges(*own)), object()
    monkeypatch.setattr(dist, "all_to_all_single", wire)
    pending = group_cast([k, v], cast, AllToAll(group), room)  # type: ignore[arg-type]
    assert wire.group is group and wire.counts == ([0, 3], [0, 2])
    sent = torch.cat([k.flatten(1), v.flatten(1)], 1)[[1, 2, 5]]
    assert torch.equal(wire.sent.view(torch.bfloat16), sent)
    mine = [row for start, end in own for row in range(start, end)]
    keys, values = pending.wait()
    assert keys.shape == (len(mine) + 2 + room, 2, 3) and values.shape[1:] == (2, 1)
    for got, x, columns in ((keys, k, slice(0, 6)), (values, v, slice(6, 8))):
        assert torch.equal(got[: len(mine)], x[mine])
        received = got[len(mine) : len(mine) + 2]
        assert torch.equal(received.flatten(1), arriving[:, columns])


def test_empty_messages_are_sent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank takes part in an all-to-all, also one that neither sends nor receives."""
    plan = GroupCastPlan(ranges(), (0, 0), (0, 0), ranges(), ranges(), 6)
    (cast,) = prepare_casts([plan], CPU)
    wire = Wire(torch.zeros(0, 3))
    monkeypatch.setattr(dist, "all_to_all_single", wire)
    (rows,) = group_cast([torch.randn(6, 3)], cast, AllToAll(object())).wait()  # type: ignore[arg-type]
    assert rows.shape == (0, 3) and wire.counts == ([0, 0], [0, 0])
