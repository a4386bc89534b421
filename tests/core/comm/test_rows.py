"""Rows moved and added: the CUDA kernels against PyTorch's operations, bit by bit."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_magi.core.comm import rows as row_moves
from megatron_magi.core.comm.rows import (
    RowSources,
    add_rows,
    add_rows_into,
    gather_rows,
    side_by_side_gather,
    source_tables,
)
from megatron_magi.core.cuda.library import cuda_library
from megatron_magi.core.cuda.tables import upload_together
from megatron_magi.core.plan.token_layout import Int32Array
from tests.core.kernel import abi_on_cpu

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")],
    ),
]
SHAPES = [(2, 64), (8, 128), (3, 8), (1, 4096), (5, 7)]


def row_sources(owners: Int32Array, num_rows: int, device: torch.device) -> RowSources:
    return RowSources(*upload_together([owners, *source_tables(owners, num_rows)], device))


def side_by_side(rows: int, shape: tuple[int, int], dtype: torch.dtype, device: str) -> list:
    """Two tensors whose rows lie side by side."""
    width = shape[0] * shape[1]
    buffer = torch.full((rows, 2 * width), 7.0, dtype=dtype, device=device)
    return [part.unflatten(1, shape) for part in buffer.split(width, dim=1)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_rows", [0, 1, 9, 1000])
def test_gather(num_rows: int, dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    """Into columns of a buffer and out of one, with an index and without."""
    if device == "cuda":
        cuda_library()
    gen = torch.Generator().manual_seed(num_rows)
    xs = [torch.randn(50, *shape, generator=gen).to(device, dtype) for _ in range(2)]
    index = torch.randint(0, 50, (num_rows,), generator=gen, dtype=torch.int32).to(device)
    targets = side_by_side(num_rows, shape, dtype, device)
    gather_rows(xs, index, targets)
    for x, target in zip(xs, targets, strict=True):
        assert torch.equal(target, x[index])
    back = [torch.zeros(num_rows, *shape, dtype=dtype, device=device) for _ in range(2)]
    gather_rows(targets, None, back)
    for x, target in zip(back, targets, strict=True):
        assert torch.equal(target, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", [(192, 128), (24, 16), (3, 5)], ids=str)
def test_rows_of_two_widths(widths: tuple[int, int], device: str) -> None:
    """Keys and values of different widths, side by side in one buffer and back."""
    if device == "cuda":
        cuda_library()
    gen = torch.Generator().manual_seed(0)
    xs = [torch.randn(50, 2, width, generator=gen).to(device) for width in widths]
    index = torch.randint(0, 50, (33,), generator=gen, dtype=torch.int32)
    buffer = torch.full((33, 2 * sum(widths)), 7.0, device=device)
    split = buffer.split([2 * width for width in widths], dim=1)
    targets = [part.unflatten(1, (2, -1)) for part in split]
    gather_rows(xs, index.to(device), targets)
    assert all(torch.equal(t, x[index.to(device)]) for x, t in zip(xs, targets, strict=True))
    own = [torch.zeros_like(x) for x in xs]
    want = [torch.zeros_like(x) for x in xs]
    sources = row_sources(index.numpy(), 50, torch.device(device))
    peers = [slice(i, i + 1) for i in range(33)]
    for x, part in zip(want, targets, strict=True):
        for row in range(33):
            x[index[row]] += part[row]
    assert all(map(torch.equal, add_rows_into(own, targets, sources, peers, xs[0].dtype), want))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("received", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [(), (0, 0), (40, 0, 17), (3, 60, 1, 59)])
def test_add(
    counts: tuple[int, ...], received: torch.dtype, shape: tuple[int, int], device: str
) -> None:
    """One peer after the other, in fp32: the bits of a plain loop."""
    if device == "cuda":
        cuda_library()
    gen = torch.Generator().manual_seed(sum(counts))
    owners = torch.cat(
        [torch.zeros(0, dtype=torch.int32)]
        + [torch.randperm(60, generator=gen)[:n].sort().values.int() for n in counts]
    )
    bounds = torch.tensor((0, *counts)).cumsum(0).tolist()
    peers = [slice(a, b) for a, b in pairwise(bounds)]
    own = [torch.randn(60, *shape, generator=gen).to(device) for _ in range(2)]
    arrived = side_by_side(len(owners), shape, received, device)
    for part in arrived:
        part.copy_(torch.randn(part.shape, generator=gen))
    want = [x.clone() for x in own]
    for x, part in zip(want, arrived, strict=True):
        for rows in peers:
            x[owners[rows].to(device)] += part[rows].float()
    sources = row_sources(owners.numpy(), 60, torch.device(device))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mine = [x.clone() for x in own]
        sums = add_rows_into(mine, arrived, sources, peers, dtype)
        for got, x in zip(sums, want, strict=True):
            assert got.dtype == dtype and got.is_contiguous() and torch.equal(got, x.to(dtype))
    add_rows(own, arrived, sources, peers)
    assert all(map(torch.equal, own, want))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_the_kernels_are_what_runs_on_a_gpu() -> None:
    """PyTorch's way would pass the tests above as well."""
    library = cuda_library()
    x = torch.randn(20, 2, 64, device="cuda")
    sources = row_sources(np.arange(20, dtype=np.int32), 20, x.device)
    with mock.patch.object(library, "call", wraps=library.call) as call:
        gather_rows([x], None, [torch.empty_like(x)])
        add_rows([x], [x.clone()], sources, [slice(0, 20)])
        row_moves.head_start(x.device)
    assert [c.args[0] for c in call.call_args_list] == ["magi_gather_rows", "magi_add_rows"]
    torch.cuda.synchronize()


def test_other_indices_are_refused() -> None:
    x = torch.zeros(4, 2, 8)
    with pytest.raises(TypeError, match=r"index must be int32, got torch\.int64"):
        gather_rows([x], torch.arange(4), [x])


def test_what_does_not_fit_the_kernels() -> None:
    def fits(x: Tensor) -> bool:
        return row_moves._is_packed(x.shape, x.stride(), x.dtype)

    x = torch.zeros(6, 2, 8)
    assert fits(x) and fits(x[:0]) and fits(x[:, :1])
    assert not fits(x[..., ::2]) and not fits(x.transpose(1, 2)) and not fits(x[:, :, 1:])
    assert not fits(x.double()) and not fits(torch.zeros(6, 1, 3))
    assert fits(torch.zeros(6, 4, 8)[:, 1:3]), "columns of a wider row"


def test_only_the_rows_that_were_asked_for(library: abi_on_cpu.CpuLibrary) -> None:
    x, target = torch.randn(9, 2, 8), torch.zeros(12, 2, 8)
    for index, want in ((torch.tensor([4, 0, 4], dtype=torch.int32), [4, 0, 4]), (None, range(9))):
        gather_rows([x], index, [target.zero_()], len(want))
        assert torch.equal(target[: len(want)], x[list(want)]) and not target[len(want) :].any()
    assert library.calls == ["magi_gather_rows"] * 2


def at(x: Tensor, elements: int) -> Tensor:
    """Equal values that begin so many elements behind a multiple of 16 bytes."""
    room = torch.zeros(elements + x.numel(), dtype=x.dtype)
    assert room.data_ptr() % 16 == 0
    return room[elements:].view(x.shape).copy_(x)


ROWS: dict[str, tuple[tuple[int, int], torch.dtype, int]] = {
    "usual": ((2, 8), torch.float32, 0),
    "another base": ((2, 8), torch.float32, 4),
    "a base between": ((2, 8), torch.float32, 1),
    "wider": ((2, 16), torch.float32, 0),
    "narrow": ((1, 3), torch.float32, 0),
    "half": ((2, 8), torch.bfloat16, 0),
    "fp64": ((2, 8), torch.float64, 0),
}
"""Shape, dtype and offset of what is moved."""


@pytest.mark.parametrize("first", ROWS)
def test_rows_of_every_form_are_moved_after_rows_of_another(
    first: str, library: abi_on_cpu.CpuLibrary
) -> None:
    """By the kernel where it takes them: addresses differ in calls of one form."""
    index = torch.tensor([4, 0, 4], dtype=torch.int32)
    for name in (first, *ROWS, *ROWS):
        shape, dtype, offset = ROWS[name]
        xs = [at(torch.randn(9, *shape, dtype=dtype), offset) for _ in range(2)]
        targets = [at(torch.zeros(3, *shape, dtype=dtype), offset) for _ in range(2)]
        before = len(library.calls)
        gather_rows(xs, index, targets)
        for x, target in zip(xs, targets, strict=True):
            assert torch.equal(target, x[index]), name
        by_kernel = offset % 4 == 0 and dtype != torch.float64 and shape != (1, 3)
        assert len(library.calls) - before == by_kernel, name


@pytest.mark.parametrize("first", ROWS)
def test_rows_of_every_form_are_added_after_rows_of_another(
    first: str, library: abi_on_cpu.CpuLibrary
) -> None:
    owners = np.array([4, 0, 4], np.int32)
    sources = row_sources(owners, 9, torch.device("cpu"))
    peers = [slice(i, i + 1) for i in range(3)]
    for name in (first, *ROWS, *ROWS):
        shape, dtype, offset = ROWS[name]
        own = [torch.randn(9, *shape) for _ in range(2)]
        received = [at(torch.randn(3, *shape, dtype=dtype), offset) for _ in range(2)]
        want = [x.clone() for x in own]
        for x, parts in zip(want, received, strict=True):
            for owner, part in zip(owners, parts, strict=True):
                x[int(owner)] += part.float()
        before = len(library.calls)
        sums = add_rows_into(own, received, sources, peers, torch.float32)
        for got, x in zip(sums, want, strict=True):
            torch.testing.assert_close(got, x)
        by_kernel = offset % 4 == 0 and dtype != torch.float64 and shape != (1, 3)
        assert len(library.calls) - before == by_kernel, name


def test_rows_side_by_side_by_one_call(library: abi_on_cpu.CpuLibrary) -> None:
    """What a transport gathers to an address; other tensors than one kernel takes have no way."""
    index = torch.tensor([5, 1], dtype=torch.int32)
    for _ in range(2):
        xs = [torch.randn(9, 2, 8) for _ in range(2)]
        target = torch.zeros(2, 32)
        how = side_by_side_gather(xs, 2)
        assert how is not None and how.row_bytes == 64
        library.call("magi_gather_rows", how.params(xs, index, target.data_ptr()))
        assert torch.equal(target, torch.cat([x[index].flatten(1) for x in xs], 1))
    assert side_by_side_gather([at(x, 1) for x in xs], 2) is None
    assert side_by_side_gather([xs[0], xs[1][:, :1]], 2) is None
    assert side_by_side_gather([x.double() for x in xs], 2) is None
    assert side_by_side_gather([*xs, xs[0]], 2) is None
