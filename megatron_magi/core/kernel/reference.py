"""Attention over slices in plain PyTorch: any device, any float dtype, never a full score matrix.

It follows the definition step by step: a tile's scores, the band, a softmax that is merged tile by
tile. Shapes: T query tokens, S key tokens, H query heads, G key/value heads, R = H / G, D head_dim
(values and their output may have another one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from megatron_magi.core.kernel.backend import (
    AttnCall,
    GradCall,
    OutLse,
    StatelessBackend,
    acc_dtype,
    copy_grads_,
    final_delta,
    row_delta,
    scatter_rows_,
)
from megatron_magi.core.kernel.merge import merge_
from megatron_magi.core.kernel.sink import check_joins, join_sink_
from megatron_magi.core.kernel.slice_table import SliceTable

_TILE_CELLS = 2**22
"""Score elements (heads x queries x keys) in a tile: 16 MiB in fp32."""

Tile = tuple[slice, slice, Tensor | None]
P = ParamSpec("P")
R = TypeVar("R")


def _without_autocast(method: Callable[P, R]) -> Callable[P, R]:
    """Keep products in the accumulation dtype, inside ``torch.autocast`` too."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return method(*args, **kwargs)

    return run


class ReferenceBackend(StatelessBackend):
    """The protocol ``AttnBackend`` in PyTorch; bit-identical from run to run on one machine."""

    name = "reference"
    adds_atomically = False
    finds_max_logits = True
    delta = staticmethod(row_delta)

    @_without_autocast
    def forward(
        self,
        call: AttnCall,
        *,
        prev: OutLse | None = None,
        into: OutLse | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> OutLse:
        check_joins(call, prev)
        q_THD, v_SGD, table = call.q, call.v, call.table
        acc = acc_dtype(q_THD.dtype)
        out, lse = prev or (
            q_THD.new_zeros((*q_THD.shape[:2], v_SGD.shape[2]), dtype=acc),
            torch.full(q_THD.shape[:2], -torch.inf, dtype=acc, device=q_THD.device),
        )
        sees = torch.zeros(len(q_THD), dtype=torch.bool, device=q_THD.device)
        for rows, keys, hidden in _tiles(table, q_THD.shape[1], q_THD.device):
            sees[rows] |= True if hidden is None else ~hidden.all(1)
            logits = _logits(call, rows, keys, hidden)
            if call.max_logits is not None:
                torch.maximum(call.max_logits, logits.amax((2, 3)).flatten(), out=call.max_logits)
            tile_lse = logits.logsumexp(-1)
            probs = (logits - _finite(tile_lse).unsqueeze(-1)).exp_()
            tile_out = torch.einsum("grts,sgd->tgrd", probs, v_SGD[keys].to(acc)).flatten(1, 2)
            merge_(out[rows], lse[rows], tile_out, tile_lse.flatten(0, 1).T)
        _fail_rows_of_infinities(out, lse, sees)
        join_sink_(out, lse, call)
        if into is not None:
            return scatter_rows_((out, lse), table, into)
        if prev is None:
            out = out.to(out_dtype or q_THD.dtype)
        return out, lse

    @_without_autocast
    def backward(self, call: AttnCall, grad: GradCall) -> tuple[Tensor, Tensor, Tensor]:
        q_THD, k_SGD, v_SGD, table = call[:4]
        acc = acc_dtype(q_THD.dtype)
        delta_TH = final_delta(grad, acc)
        dq = torch.zeros_like(q_THD, dtype=acc) if grad.dq is None else grad.dq
        dk = torch.zeros_like(k_SGD, dtype=acc)
        dv = torch.zeros_like(v_SGD, dtype=acc)
        groups = k_SGD.shape[1]
        for rows, keys, hidden in _tiles(table, q_THD.shape[1], q_THD.device):
            q, k, v = _grouped(q_THD[rows], groups, acc), k_SGD[keys].to(acc), v_SGD[keys].to(acc)
            dout = _grouped(grad.dout[rows], groups, acc)
            logits = _logits(call, rows, keys, hidden)
            probs = (logits - _finite(_per_row(grad.lse[rows], groups))).exp_()
            if hidden is not None:  # a nan row is nan in its visible cells only
                probs.masked_fill_(hidden, 0.0)
            dprobs = torch.einsum("tgrd,sgd->grts", dout, v)
            dscores = probs * (dprobs - _per_row(delta_TH[rows], groups)) * call.softmax_scale
            if call.softcap:
                dscores *= _slopes(logits, call.softcap)
            # Per query head first, then over the group: shorter sums, smaller rounding errors.
            dv[keys] += torch.einsum("grts,tgrd->sgrd", probs, dout).sum(2)
            dk[keys] += torch.einsum("grts,tgrd->sgrd", dscores, q).sum(2)
            dq[rows] += torch.einsum("grts,sgd->tgrd", dscores, k).flatten(1, 2)
        wanted = grad.dtype or acc
        dq = dq if grad.dq is not None else dq.to(wanted)
        return dq, *copy_grads_((dk.to(wanted), dv.to(wanted)), grad.dkv)


def _tiles(table: SliceTable, num_heads: int, device: torch.device) -> Iterator[Tile]:
    """(query rows, keys, cells hidden by the band or None) of every tile with a visible cell."""
    side = max(16, int((_TILE_CELLS / max(1, num_heads)) ** 0.5))
    for q0, q1, k0, k1, d_lo, d_hi in table.slices.tolist():
        for row in range(q0, q1, side):
            row_end = min(row + side, q1)
            first, last = max(k0, row + d_lo), min(k1, row_end + d_hi)
            for key in range(first, last, side):
                rows, keys = slice(row, row_end), slice(key, min(key + side, last))
                yield rows, keys, _hidden(rows, keys, (d_lo, d_hi), device)


def _hidden(rows: slice, keys: slice, band: tuple[int, int], device: torch.device) -> Tensor | None:
    """bool [rows, keys], True outside the band; None where the band covers the tile."""
    d_lo, d_hi = band
    if keys.start - (rows.stop - 1) >= d_lo and (keys.stop - 1) - rows.start <= d_hi:
        return None
    key, query = (torch.arange(x.start, x.stop, device=device) for x in (keys, rows))
    diagonal = key - query[:, None]
    return (diagonal < d_lo) | (diagonal > d_hi)


def _logits(call: AttnCall, rows: slice, keys: slice, hidden: Tensor | None) -> Tensor:
    """Logits [G, R, T, S] of a tile in the accumulation dtype, -inf where hidden."""
    acc = acc_dtype(call.q.dtype)
    q = _grouped(call.q[rows], call.k.shape[1], acc)
    logits = torch.einsum("tgrd,sgd->grts", q, call.k[keys].to(acc)) * call.softmax_scale
    if call.softcap:
        logits = logits.div_(call.softcap).tanh_().mul_(call.softcap)
    return logits if hidden is None else logits.masked_fill_(hidden, -torch.inf)


def _slopes(logits: Tensor, softcap: float) -> Tensor:
    """The derivative of capped logits by scaled scores, 1 - tanh^2; 0 where they are hidden."""
    return (1.0 - (logits / softcap).square_()).clamp_(min=0.0)


def _fail_rows_of_infinities(out_THD: Tensor, lse_TH: Tensor, sees_T: Tensor) -> None:
    """Write nan to rows without a softmax: those that see a score of inf, or none but -inf."""
    failed = lse_TH.isinf() & sees_T.unsqueeze(-1)
    out_THD.masked_fill_(failed.unsqueeze(-1), torch.nan)
    lse_TH.masked_fill_(failed, torch.nan)


def _grouped(x_THD: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[T, G, R, D]: query heads grouped by the key/value head that they share."""
    return x_THD.unflatten(1, (groups, -1)).to(dtype)


def _per_row(x_TH: Tensor, groups: int) -> Tensor:
    """[G, R, T, 1] from [T, H]."""
    return x_TH.T.unflatten(0, (groups, -1)).unsqueeze(-1)


def _finite(lse: Tensor) -> Tensor:
    """lse with -inf replaced by 0, so that exp(-inf - lse) of an empty row is 0 and not nan."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
