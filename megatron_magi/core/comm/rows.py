"""Moving and adding rows: one pass of our CUDA kernels if they are loaded, otherwise PyTorch.

Both give equal bits, because they sum in the accumulation dtype and in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_magi.core.cuda.abi import (
    DTYPE_CODES,
    MAX_ROW_PARTS,
    AddParams,
    GatherParams,
    fill_rows,
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
    library = _library_for(xs[0].device, *xs, *into)
    if library is not None and _has_many_shapes(xs):
        for x, target in zip(xs, into, strict=True):
            gather_rows([x], index, [target], num_rows)
        return
    if library is None or len(xs) > MAX_ROW_PARTS:
        for x, target in zip(xs, into, strict=True):
            target[:num_rows].copy_(x if index is None else x.index_select(0, index))
        return
    params = GatherParams(
        index=None if index is None else index.data_ptr(),
        stream=stream_handle(xs[0].device),
        num_rows=num_rows,
        row_bytes=xs[0].shape[1:].numel() * xs[0].element_size(),
        num_parts=len(xs),
    )
    for place, given in ((params.src, xs), (params.dst, into)):
        fill_rows(place, given)
    with on_device(xs[0].device):
        library.call("magi_gather_rows", params)


def one_kernel_gathers(xs: Sequence[Tensor]) -> bool:
    """Whether the loaded library gathers rows of these tensors in one call."""
    library = _library_for(xs[0].device, *xs)
    return library is not None and len(xs) <= MAX_ROW_PARTS and not _has_many_shapes(xs)


def fill_gather(params: GatherParams, xs: Sequence[Tensor], index: Tensor, into: int) -> None:
    """Describe ``gather_rows`` of tensors that one kernel gathers to rows side by side at an
    address."""
    row_bytes = xs[0].shape[1:].numel() * xs[0].element_size()
    params.index = index.data_ptr()
    params.stream = stream_handle(xs[0].device)
    params.num_rows, params.row_bytes, params.num_parts = len(index), row_bytes, len(xs)
    fill_rows(params.src, xs)
    for i in range(len(xs)):
        target = params.dst[i]
        target.data, target.stride = into + i * row_bytes, len(xs) * row_bytes


@dataclass(frozen=True)
class RowSources:
    """Which received rows are added to every owned row, in which order."""

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
    library = _library_for(own[0].device, *own, *received, *targets)
    if library is not None and _has_many_shapes(own):
        for i in range(len(own)):
            _add(own[i : i + 1], received[i : i + 1], sources, peers, targets[i : i + 1])
        return
    fits = len(own) <= MAX_ROW_PARTS and all(x.dtype == torch.float32 for x in own)
    if library is not None and fits and own[0].shape[1:].numel() % 8 == 0:
        _add_by_kernel(library, own, received, sources, targets)
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
) -> None:
    params = AddParams(
        begin=sources.begin.here().data_ptr(),
        sources=sources.sources.here().data_ptr(),
        stream=stream_handle(own[0].device),
        num_rows=own[0].shape[0],
        width=own[0].shape[1:].numel(),
        num_parts=len(own),
        received_dtype=DTYPE_CODES[received[0].dtype],
        dst_dtype=DTYPE_CODES[targets[0].dtype],
    )
    for place, given in ((params.own, own), (params.received, received), (params.dst, targets)):
        fill_rows(place, given)
    with on_device(own[0].device):
        library.call("magi_add_rows", params)


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
    """Whether keys and values have different widths; a kernel moves rows of one shape."""
    first = xs[0].shape[1:]
    return any(x.shape[1:] != first for x in xs[1:])


def _library_for(device: torch.device, *xs: Tensor) -> CudaLibrary | None:
    """The CUDA library if it is loaded and can take these tensors."""
    library = loaded_cuda_library(device)
    return library if library is not None and all(map(_fits, xs)) else None


def _fits(x: Tensor) -> bool:
    """Whether rows are 16-byte aligned, without gaps in a row, and of a dtype with kernels."""
    if x.dtype not in DTYPE_CODES or x.data_ptr() % 16:
        return False
    shape, strides, size = x.shape, x.stride(), x.element_size()
    width = 1
    for i in range(len(shape) - 1, 0, -1):
        length = shape[i]
        if length != 1 and strides[i] != width:
            return False
        width *= length
    return not (width * size % 16 or strides[0] * size % 16)
