"""The CUDA library on the host: what a launch asks for, computed from its structs alone.

A stand-in for tests without a GPU. Pointers, strides, tables and flags are read as the kernels read
them, so a wrong field shows; the arithmetic is PyTorch's in fp64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron_magi.core.cuda.abi import (
    AddParams,
    BwdParams,
    DeltaParams,
    FwdParams,
    GatherParams,
    ParamTemplate,
    Rows,
    SinkParams,
    TensorView,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE, ENTRY, ITEM = 8, 12, 8
"""int32 of FwdTile, FwdEntry and BwdItem (csrc/attention/work_lists.h)."""


class CpuLibrary:
    """In place of `CudaLibrary`; keeps what was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepared(self, name: str, pattern: ParamTemplate) -> Callable[..., None]:
        return lambda *values: self.call(name, pattern.filled(*values))

    def call(self, name: str, params: ctypes.Structure | bytes) -> None:
        self.calls.append(name)
        if isinstance(params, bytes):
            kind = {
                "magi_attn_fwd": FwdParams, "magi_attn_bwd": BwdParams,
                "magi_row_delta": DeltaParams, "magi_add_rows": AddParams,
                "magi_gather_rows": GatherParams,
            }[name]  # fmt: skip
            params = kind.from_buffer_copy(params)
        {
            "magi_attn_fwd": forward, "magi_attn_bwd": backward, "magi_row_delta": delta,
            "magi_gather_rows": gather, "magi_add_rows": add, "magi_sink_gradient": sink_gradient,
        }[name](params)  # type: ignore[operator]  # fmt: skip


def memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """``count`` elements that begin there; writes go through."""
    size = count * dtype.itemsize
    if size == 0:
        return torch.empty(0, dtype=dtype)
    buffer = (ctypes.c_byte * size).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


def strided(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    flat = memory(address, span if all(shape) else 0, dtype)
    return torch.as_strided(flat, shape, strides) if all(shape) else flat.reshape(shape)


def view(x: TensorView, tokens: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    return strided(x.data, (tokens, heads, width), (x.stride_token, x.stride_head, 1), dtype)


def check_places(*views: TensorView) -> None:
    """The copy engine reads and writes at multiples of 16 bytes."""
    assert all((x.data or 0) % 16 == 0 for x in views)


def table(address: int, rows: int, columns: int) -> np.ndarray:
    return memory(address, rows * columns, torch.int32).numpy().reshape(rows, columns)


def forward(p: FwdParams) -> None:
    """Tile by tile, as the work list says."""
    check_places(p.q, p.k, p.v)
    dtype, out_dtype = DTYPES[p.dtype], DTYPES[p.out_dtype]
    q = view(p.q, p.num_q, p.num_heads_q, p.head_dim, dtype)
    k, v = (
        view(x, p.num_k, p.num_heads_kv, width, dtype)
        for x, width in ((p.k, p.head_dim), (p.v, p.value_dim))
    )
    tiles = table(p.tiles, p.num_tiles, TILE)
    entries = table(p.entries, num_entries(p), ENTRY)
    empty = table(p.empty_rows, p.num_empty_ranges, 2)
    ends = [*(out + tokens for _, tokens, _, _, _, out, *_ in tiles.tolist()), *empty[:, 1]]
    rows = max(max(ends, default=0), p.num_q)
    out = view(p.out, rows, p.num_heads_q, p.value_dim, out_dtype)
    strides = p.lse_stride_token, p.lse_stride_head
    lse = strided(p.lse, (rows, p.num_heads_q), strides, torch.float32)
    assert p.block_m % p.pack == 0 and p.heads_per_section >= 1 and p.num_sms >= 1
    counter = memory(p.counter, 2, torch.int32)
    assert counter.tolist() == [0, 0], "zero between launches"
    assert not (p.merge and p.sink_lse), "sinks join the first result"
    for q0, tokens, first, number, _, at, *_ in tiles.tolist():
        assert tokens * p.pack <= p.block_m
        seen = visible(range(q0, q0 + tokens), entries[first : first + number], p)
        if p.max_logits:
            raise_largest(memory(p.max_logits, p.num_heads_q, torch.float32),
                          logits(q[q0 : q0 + tokens], k, seen, p))  # fmt: skip
        made = attend(q[q0 : q0 + tokens], k, v, seen, p)
        made = joined(*made, sinks(p, at, at + tokens))
        if p.merge:
            made = merged((out[at : at + tokens], lse[at : at + tokens]), made)
        out[at : at + tokens], lse[at : at + tokens] = made[0].to(out_dtype), made[1].float()
    for begin, end in empty.tolist():
        if not p.merge:
            out[begin:end], lse[begin:end] = 0, sinks(p, begin, end).float()


def sinks(p: FwdParams, begin: int, end: int) -> Tensor:
    """The logit that joins each of these rows and its heads; later parts of keys have none."""
    made = torch.full((end - begin, p.num_heads_q), -torch.inf, dtype=torch.float64)
    first = max(0, min(end, p.num_q) - begin)
    if p.sink_lse and first:
        strides = p.sink_stride_token, 1
        given = strided(p.sink_lse, (p.num_q, p.num_heads_q), strides, torch.float32)
        made[:first] = given[begin : begin + first].double()
    return made


def joined(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    return merged((torch.zeros_like(out), sink), (out, lse))


def num_entries(p: FwdParams) -> int:
    """Of all tiles."""
    tiles = table(p.tiles, p.num_tiles, TILE)
    return int((tiles[:, 2] + tiles[:, 3]).max(initial=0))


def visible(rows: range, entries: np.ndarray, p: FwdParams) -> Tensor:
    """bool [rows, num_k] of a tile."""
    seen = np.zeros((len(rows), p.num_k), bool)
    query = np.arange(rows.start, rows.stop)[:, None]
    for k_begin, number, _, _, qs, qe, ks, ke, lo, hi, *_ in entries.tolist():
        key = np.arange(k_begin, min(k_begin + number * p.block_n, p.num_k))[None, :]
        inside = (query >= qs) & (query < qe) & (key >= ks) & (key < ke)
        seen[:, key[0]] |= inside & (key - query >= lo) & (key - query <= hi)
    return torch.from_numpy(seen)


def logits(q: Tensor, k: Tensor, seen: Tensor, p: FwdParams) -> Tensor:
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    made = torch.einsum("thd,shd->hts", q.double(), keys) * p.softmax_scale
    return capped(made, p.softcap).masked_fill(~seen, -torch.inf)


def capped(scores: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def raise_largest(largest: Tensor, made: Tensor) -> None:
    torch.maximum(largest, made.amax((1, 2)).float(), out=largest)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, p: FwdParams) -> tuple[Tensor, Tensor]:
    values = v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    made = logits(q, k, seen, p)
    lse = made.logsumexp(-1)
    probs = torch.exp(made - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("hts,shd->thd", probs, values), lse.T


def merged(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    both = torch.logaddexp(old[1].double(), new[1])
    safe = both.masked_fill(both == -torch.inf, 0.0)
    shares = [torch.exp(part[1].double() - safe).unsqueeze(-1) for part in (old, new)]
    return old[0].double() * shares[0] + new[0] * shares[1], both


BWD_MASKS: list[Tensor] = []
"""bool [num_q, num_k] of the mask whose backward comes: its entries are checked elsewhere."""


def check_items(p: BwdParams) -> None:
    """Every key is in one tile, a tile fits the kernel of these heads, and each of its sections
    starts once."""
    bands = table(p.items, p.num_items, ITEM)
    items = bands[bands[:, 6] == 0, :2].tolist()
    assert len(items) == p.num_tiles and set(bands[:, 5]) <= set(range(p.num_tiles))
    assert sorted(k for start, rows in items for k in range(start, start + rows)) == list(
        range(p.num_k)
    )
    assert max(rows for _, rows in items) <= (64 if p.head_dim > 192 else 128)


def backward(p: BwdParams) -> None:
    check_items(p)
    check_places(p.q, p.k, p.v, p.dout, p.out, p.dq_acc, p.dk, p.dv)
    dtype, made = DTYPES[p.dtype], DTYPES[p.grad_dtype]
    rows, keys = (p.num_q, p.num_heads_q), (p.num_k, p.num_heads_kv)
    q, dout = view(p.q, *rows, p.head_dim, dtype), view(p.dout, *rows, p.value_dim, dtype)
    k, v = view(p.k, *keys, p.head_dim, dtype), view(p.v, *keys, p.value_dim, dtype)
    strides = p.lse_stride_token, p.lse_stride_head
    lse = strided(p.lse, rows, strides, torch.float32).double()
    assert bool(p.out.data) != bool(p.delta), "one of them"
    if p.delta:
        strides = p.delta_stride_token, p.delta_stride_head
        sums = strided(p.delta, rows, strides, torch.float32).double()
    else:
        sums = (view(p.out, *rows, p.value_dim, dtype).double() * dout.double()).sum(-1)
    grads = gradients((q, k, v), dout, lse, sums, (p.softmax_scale, p.softcap))
    view(p.dk, *keys, p.head_dim, made).copy_(grads[1])
    view(p.dv, *keys, p.value_dim, made).copy_(grads[2])
    total = view(p.dq_acc, *rows, p.head_dim, torch.float32)
    if p.clear_dq:
        total.zero_()
    total += grads[0]
    if p.dq.data:
        view(p.dq, *rows, p.head_dim, made).copy_(total)


def gradients(
    qkv: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale_and_cap: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in fp64 by the definition, from the final lse."""
    (q, k, v), (scale, softcap) = qkv, scale_and_cap
    seen, repeat = BWD_MASKS[-1], q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), keys) * scale
    slopes = 1.0 - torch.tanh(scores / softcap) ** 2 if softcap else 1.0
    probs = torch.exp(capped(scores, softcap) - lse.T[..., None]).masked_fill(~seen, 0.0)
    dprobs = torch.einsum("thd,shd->hts", dout.double(), values)
    dscores = (probs * (dprobs - delta.T[..., None])).masked_fill(~seen, 0.0) * slopes * scale
    dq = torch.einsum("hts,shd->thd", dscores, keys)
    dk = torch.einsum("hts,thd->shd", dscores, q.double())
    dv = torch.einsum("hts,thd->shd", probs, dout.double())
    return dq, *(x.unflatten(1, (-1, repeat)).sum(2) for x in (dk, dv))


def delta(p: DeltaParams) -> None:
    shape, dtype = (p.num_tokens, p.num_heads, p.value_dim), DTYPES[p.dtype]
    out, dout = view(p.out, *shape, dtype), view(p.dout, *shape, dtype)
    made = memory(p.delta, p.num_tokens * p.num_heads, torch.float32)
    made.copy_((out.float() * dout.float()).sum(-1).flatten())


def sink_gradient(p: SinkParams) -> None:
    """Block by block, each with 8 tokens at a time."""
    shape = p.num_tokens, p.num_heads
    lse, delta = (memory(x, shape[0] * shape[1], torch.float32).view(shape).double()
                  for x in (p.lse, p.delta))  # fmt: skip
    first = shape if p.per_token else (p.num_heads,)
    sink = memory(p.sink_lse, torch.Size(first).numel(), torch.float32).view(first)
    made = -torch.exp(sink.double() - lse) * delta
    if not p.per_token:
        block = torch.arange(p.num_tokens) // 8 % p.num_blocks
        shape = p.num_blocks, p.num_heads
        made = torch.zeros(shape, dtype=torch.float64).index_add_(0, block, made)
    memory(p.grad, shape[0] * shape[1], torch.float32).view(shape).copy_(made)


def rows_at(x: Rows, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    stride, rest = divmod(x.stride, dtype.itemsize)
    assert rest == 0
    return strided(x.data, (num_rows, width), (stride, 1), dtype)


def gather(p: GatherParams) -> None:
    """Rows as bytes; sources without an index are the rows themselves."""
    index = memory(p.index, p.num_rows, torch.int32) if p.index else torch.arange(p.num_rows)
    last = int(index.max()) + 1 if p.num_rows else 0
    for part in range(p.num_parts):
        source = rows_at(p.src[part], last, p.row_bytes, torch.uint8)
        rows_at(p.dst[part], p.num_rows, p.row_bytes, torch.uint8).copy_(source[index])


def add(p: AddParams) -> None:
    """In fp32: the owned row first, then its sources in their order."""
    begin = memory(p.begin, p.num_rows + 1, torch.int32).tolist()
    sources = memory(p.sources, begin[-1], torch.int32).tolist()
    for part in range(p.num_parts):
        own = rows_at(p.own[part], p.num_rows, p.width, torch.float32)
        received = rows_at(p.received[part], begin[-1], p.width, DTYPES[p.received_dtype])
        target = rows_at(p.dst[part], p.num_rows, p.width, DTYPES[p.dst_dtype])
        for row in range(p.num_rows):
            total = own[row].clone()
            for source in sources[begin[row] : begin[row + 1]]:
                total += received[source].float()
            target[row] = total
