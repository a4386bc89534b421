"""Moving and adding rows: one pass of magi's CUDA kernels if they are loaded, otherwise PyTorch.

Both give equal bits, because they sum in the accumulation dtype and in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_magi.core.cuda.abi import (
    DTYPE_CODES,
    MAX_ROW_PARTS,
    AddParams,
    GatherParams,
    ParamTemplate,
)
from megatron_magi.core.cuda.library import (
    CudaLibrary,
    loaded_cuda_library,
    on_device,
    stream_handle,
)
from megatron_magi.core.cuda.tables import DeviceTable
from megatron_magi.core.plan.token_layout import Int32Array

HEAD_START_NS = 5000


def gather_rows(
    xs: Sequence[Tensor],
    index: Tensor | None,
    into: Sequence[Tensor],
    num_rows: int | None = None,
) -> None:
    """``into[i][r] = xs[i][index[r]]``; no index: row r.

    Args:
        xs: [n, ...] each, of one dtype; into: [num_rows or more, ...] each.
        index: int32 [num_rows].
        num_rows: how many rows of ``into`` are written, from the first on; None: all.

    Cost: one kernel if all rows have one shape, otherwise one for each tensor.
    """
    if index is not None and index.dtype != torch.int32:
        raise TypeError(f"index must be int32, got {index.dtype}; the kernel reads 4 bytes a row")
    num_rows = into[0].shape[0] if num_rows is None else num_rows
    library = loaded_cuda_library(xs[0].device)
    if library is not None and _has_many_shapes(xs):
        for x, target in zip(xs, into, strict=True):
            gather_rows([x], index, [target], num_rows)
        return
    if library is not None and _gather_by_kernel(library, xs, index, into, num_rows):
        return
    for x, target in zip(xs, into, strict=True):
        target[:num_rows].copy_(x if index is None else x.index_select(0, index))


def _gather_by_kernel(
    library: CudaLibrary,
    xs: Sequence[Tensor],
    index: Tensor | None,
    into: Sequence[Tensor],
    num_rows: int,
) -> bool:
    """Gather rows of one shape by one kernel; False: it does not take these tensors."""
    both = (*xs, *into)
    places = [x.data_ptr() for x in both]
    run = _gathering(library, num_rows, *[(x.shape, x.stride(), x.dtype) for x in both])
    if run is None or any(place % 16 for place in places):
        return False
    device = xs[0].device
    at = 0 if index is None else index.data_ptr()
    with on_device(device):
        run(*places, at, stream_handle(device))
    return True


Lies = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


@lru_cache(maxsize=256)  # the layers and microbatches of a plan are alike
def _gathering(library: CudaLibrary, num_rows: int, *both: Lies) -> Callable[..., None] | None:
    """A launch for tensors of these shapes, strides and dtypes, as a function of their addresses,
    that of the index and the stream. None: no kernel takes them."""
    pattern = _gather_pattern(num_rows, *both)
    return None if pattern is None else library.prepared("magi_gather_rows", pattern)


def _gather_pattern(num_rows: int, *both: Lies) -> ParamTemplate | None:
    """``both``: the sources, and as many targets."""
    num_parts = len(both) // 2
    if num_parts > MAX_ROW_PARTS or not all(_is_packed(*x) for x in both):
        return None
    (_, *row), _, dtype = both[0]
    row_bytes = math.prod(row) * dtype.itemsize
    params = GatherParams(num_rows=num_rows, row_bytes=row_bytes, num_parts=num_parts)
    names = _fill_strides(params, {"src": both[:num_parts], "dst": both[num_parts:]})
    return ParamTemplate(params, [*names, "index", "stream"])


def _fill_strides(params: Any, parts: dict[str, Sequence[Lies]]) -> list[str]:
    """Fill in the strides of each field's tensors; return the names of their address fields."""
    names = []
    for name, some in parts.items():
        for i, (_, strides, dtype) in enumerate(some):
            getattr(params, name)[i].stride = strides[0] * dtype.itemsize
            names.append(f"{name}.{i}.data")
    return names


class SideBySideGather(NamedTuple):
    """A kernel launch that gathers rows of several tensors and writes them side by side."""

    pattern: ParamTemplate
    row_bytes: int
    """The bytes of one row of one tensor."""

    def params(self, xs: Sequence[Tensor], index: Tensor, into: int) -> bytes:
        """The bytes of GatherParams; rows are written from the address ``into`` on."""
        targets = range(into, into + len(xs) * self.row_bytes, self.row_bytes)
        places = *(x.data_ptr() for x in xs), *targets, index.data_ptr()
        return self.pattern.filled(*places, stream_handle(index.device))


def side_by_side_gather(xs: Sequence[Tensor], num_rows: int) -> SideBySideGather | None:
    """The launch for these tensors; None if the library is not loaded or does not take them."""
    if loaded_cuda_library(xs[0].device) is None or any(x.data_ptr() % 16 for x in xs):
        return None
    return _gathering_side_by_side(num_rows, *[(x.shape, x.stride(), x.dtype) for x in xs])


@lru_cache(maxsize=256)
def _gathering_side_by_side(num_rows: int, *xs: Lies) -> SideBySideGather | None:
    (_, *row), _, dtype = xs[0]
    if any(list(shape[1:]) != row for shape, _, _ in xs):
        return None
    width = math.prod(row)
    part = torch.Size((num_rows, width)), (len(xs) * width, 1), dtype
    pattern = _gather_pattern(num_rows, *xs, *[part] * len(xs))
    return None if pattern is None else SideBySideGather(pattern, width * dtype.itemsize)


@dataclass(frozen=True)
class RowSources:
    """Received rows by the owned row that they are added to, in order."""

    owners: DeviceTable
    """int32 [num_received]: the owned row of every received row; PyTorch's path reads it."""
    begin: DeviceTable
    """int32 [num_rows + 1]: where each owned row's sources begin, and where the last ones end."""
    sources: DeviceTable
    """int32 [num_received]: received rows, by their owned row, then in the order received."""


def source_tables(owners: Int32Array, num_rows: int) -> tuple[Int32Array, Int32Array]:
    """``begin`` and ``sources`` of RowSources on the host."""
    begin = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(owners, minlength=num_rows), out=begin[1:])
    return begin, np.argsort(owners, kind="stable").astype(np.int32)


def add_rows(
    own: Sequence[Tensor], received: Sequence[Tensor], sources: RowSources, peers: Sequence[slice]
) -> None:
    """Add received rows to the owned ones, in place and in the order received.

    Args:
        own: [num_rows, ...] each, in the accumulation dtype.
        received: [num_received, ...] each, one for each tensor of ``own``.
        peers: parts of the received rows within which no owned row occurs twice.
    """
    _add(own, received, sources, peers, own)


def add_rows_into(
    own: Sequence[Tensor],
    received: Sequence[Tensor],
    sources: RowSources,
    peers: Sequence[slice],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Like ``add_rows``, but return contiguous sums in ``dtype``; ``own`` may be overwritten."""
    targets = [x.new_empty(x.shape, dtype=dtype) for x in own]
    _add(own, received, sources, peers, targets)
    return targets


def _add(
    own: Sequence[Tensor],
    received: Sequence[Tensor],
    sources: RowSources,
    peers: Sequence[slice],
    targets: Sequence[Tensor],
) -> None:
    library = loaded_cuda_library(own[0].device)
    if library is not None and _has_many_shapes(own):
        for i in range(len(own)):
            _add(own[i : i + 1], received[i : i + 1], sources, peers, targets[i : i + 1])
        return
    if library is not None and _add_by_kernel(library, own, received, sources, targets):
        return
    owners = sources.owners.here()
    for rows in peers:
        for mine, theirs in zip(own, received, strict=True):
            mine.index_add_(0, owners[rows], theirs[rows].to(mine.dtype))
    for mine, target in zip(own, targets, strict=True):
        if target is not mine:
            target.copy_(mine)


def _add_by_kernel(
    library: CudaLibrary,
    own: Sequence[Tensor],
    received: Sequence[Tensor],
    sources: RowSources,
    targets: Sequence[Tensor],
) -> bool:
    """Add rows of one shape by one kernel; False: it does not take these tensors."""
    xs = (*own, *received, *targets)
    places = [x.data_ptr() for x in xs]
    run = _adding(library, *[(x.shape, x.stride(), x.dtype) for x in xs])
    if run is None or any(place % 16 for place in places):
        return False
    device = own[0].device
    tables = sources.begin.here().data_ptr(), sources.sources.here().data_ptr()
    with on_device(device):
        run(*places, *tables, stream_handle(device))
    return True


@lru_cache(maxsize=256)  # the layers and microbatches of a plan are alike
def _adding(library: CudaLibrary, *xs: Lies) -> Callable[..., None] | None:
    """A launch for tensors of these shapes, strides and dtypes, as a function of their addresses,
    those of the tables and the stream. None: no kernel adds them.

    Args:
        xs: of the own, the received and the resulting rows, equally many of each.
    """
    num_parts = len(xs) // 3
    own, received, targets = (xs[i : i + num_parts] for i in range(0, 3 * num_parts, num_parts))
    (num_rows, *row), _, _ = own[0]
    width = math.prod(row)
    fits = num_parts <= MAX_ROW_PARTS and all(dtype == torch.float32 for _, _, dtype in own)
    if not fits or width % 8 or not all(_is_packed(*x) for x in xs):
        return None
    params = AddParams(
        num_rows=num_rows,
        width=width,
        num_parts=num_parts,
        received_dtype=DTYPE_CODES[received[0][2]],
        dst_dtype=DTYPE_CODES[targets[0][2]],
    )
    names = _fill_strides(params, {"own": own, "received": received, "dst": targets})
    return library.prepared(
        "magi_add_rows", ParamTemplate(params, [*names, "begin", "sources", "stream"])
    )


def head_start(device: torch.device) -> None:
    """Delay the stream, so that an exchange that was just started runs before the next kernel.

    Both become ready at the same time. If a kernel that fills the GPU starts first, the exchange
    cannot start until that kernel ends, and nothing overlaps. Cost: ``HEAD_START_NS`` on the
    stream.
    """
    library = loaded_cuda_library(device)
    if library is None:
        return
    with on_device(device):
        library.pause(HEAD_START_NS, stream_handle(device))


def _has_many_shapes(xs: Sequence[Tensor]) -> bool:
    """True if keys and values have different widths; a kernel moves rows of one shape."""
    first = xs[0].shape[1:]
    return any(x.shape[1:] != first for x in xs[1:])


@lru_cache(maxsize=1024)
def _is_packed(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    """True if each row is contiguous, the kernels take the dtype, and rows keep the first row's
    alignment to 16 bytes."""
    if dtype not in DTYPE_CODES:
        return False
    width = 1
    for i in range(len(shape) - 1, 0, -1):
        length = shape[i]
        if length != 1 and strides[i] != width:
            return False
        width *= length
    return not (width * dtype.itemsize % 16 or strides[0] * dtype.itemsize % 16)
