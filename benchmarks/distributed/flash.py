"""FlashAttention-3 as the kernel of the distributed benchmark's other methods.

T rows of this rank, S keys of a call, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.distributed.sequences import Sequences, window_of
from benchmarks.lib.flash import Flash3
from megatron_magi import AttnMask
from megatron_magi.core.kernel.backend import AttnCall, GradCall, OutLse, acc_dtype
from megatron_magi.core.kernel.merge import merge_
from megatron_magi.core.kernel.slice_table import SliceTable

FA3 = "_fa3"
"""Behind the name of a method that runs on this kernel."""
NO_WINDOW = "a ring of whole blocks has no window"


def missing() -> str | None:
    """Why FlashAttention-3 is not there."""
    return Flash3().missing()


def refuses(method: str, mask: AttnMask) -> str | None:
    """Why the method does not run this mask on FlashAttention-3."""
    try:
        windowed = window_of(mask) >= 0
    except ValueError as error:
        return str(error)
    return NO_WINDOW if windowed and method == "ring" else None


@dataclass(frozen=True)
class FlashCall:
    """One call of its functions: one sequence is dense, several are packed."""

    rows: slice
    keys: slice
    causal: bool
    packed: dict[str, Any] | None
    """Arguments of the packed form, with tensors on the device."""

    @classmethod
    def of(cls, sequences: Sequences, device: torch.device) -> FlashCall:
        packed = None
        if len(sequences.ranges) > 1:
            made = sequences.arguments().items()
            packed = {
                k: v if v is None or isinstance(v, int) else torch.from_numpy(v).to(device)
                for k, v in made
            }
        return cls(sequences.rows, sequences.keys, sequences.causal, packed)

    def formed(self, *tensors: Tensor) -> list[Tensor]:
        """With a batch dimension in front if the call is dense."""
        return [x[None] if self.packed is None else x for x in tensors]


@dataclass(frozen=True)
class FlashCalls:
    """A table as calls."""

    forward: list[FlashCall]
    backward: list[FlashCall]
    """No two sequences of a call have keys in common."""
    rows: slice
    """From the first to the last that sees something."""
    all_rows: bool
    """Whether every row of the table does."""

    @classmethod
    def of(cls, table: SliceTable, left: int, device: torch.device) -> FlashCalls:
        whole = Sequences.of(table, left)
        apart = whole.without_common_keys()
        alone = all(len(part.ranges) == 1 for part in apart)
        together = apart if alone else [whole.with_empty_rows()]
        forward, backward = (
            [FlashCall.of(part, device) for part in parts] for parts in (together, apart)
        )
        return cls(forward, backward, whole.rows, whole.num_rows == table.num_q)


class FlashKernel:
    """Forward and backward of an AttnBackend, by the functions below FlashAttention-3's autograd
    (those of its version 3.0 with window_size_left and window_size_right). Where rows share keys,
    as the two pieces of a zigzag do, a forward is one packed call, or one dense call per piece if
    there is one document, and a backward is one call per piece. Gradients come in the dtype of q
    and are added in the accumulation dtype."""

    def __init__(self, mask: AttnMask) -> None:
        self.package, self.left = Flash3().package, window_of(mask)

    def forward(
        self, call: AttnCall, *, prev: OutLse | None = None, out_dtype: torch.dtype | None = None
    ) -> OutLse:
        """(out [T, H, D], lse [T, H]); see AttnBackend."""
        parts = self._calls(call).forward
        made = [(part.rows, *self._forward(call, part)) for part in parts]
        if prev is None:
            return _placed(made, call.q, out_dtype or call.q.dtype)
        for rows, out, lse in made:
            _merge(out.device.type)(prev[0][rows], prev[1][rows], out, lse)
        return prev

    def backward(self, call: AttnCall, grad: GradCall) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of ``grad.out``, the final one; see AttnBackend."""
        calls = self._calls(call)
        dq = call.q.new_empty(call.q.shape) if calls.all_rows else torch.zeros_like(call.q)
        dkv = torch.zeros_like(call.k), torch.zeros_like(call.v)
        for part in calls.backward:
            whole = [x[part.keys] for x in dkv]
            if part is calls.backward[0]:
                self._backward(call, grad, part, (dq[part.rows], *whole))
                continue
            more = [torch.zeros_like(x) for x in whole]
            self._backward(call, grad, part, (dq[part.rows], *more))
            for x, y in zip(whole, more, strict=True):
                x += y
        if grad.dq is not None:
            grad.dq[calls.rows] += dq[calls.rows]
            dq = grad.dq
        dtype = grad.dtype or acc_dtype(call.q.dtype)
        if grad.dkv is None:
            return dq.to(dtype), dkv[0].to(dtype), dkv[1].to(dtype)
        for place, x in zip(grad.dkv, dkv, strict=True):
            place.copy_(x)
        return dq.to(dtype), *grad.dkv

    def _forward(self, call: AttnCall, part: FlashCall) -> OutLse:
        q, k, v = part.formed(call.q[part.rows], call.k[part.keys], call.v[part.keys])
        out, lse, *_ = self.package._flash_attn_forward(
            q, k, v, **part.packed or {}, **self._rule(part), softmax_scale=call.softmax_scale
        )
        return (out[0], lse[0].T) if part.packed is None else (out, lse.T)

    def _backward(
        self, call: AttnCall, grad: GradCall, part: FlashCall, into: tuple[Tensor, ...]
    ) -> None:
        """Writes dq of the part's rows, and dk and dv of its keys."""
        assert grad.out is not None, "FlashAttention-3 computes delta itself"
        rows, keys, rule, sizes = part.rows, part.keys, self._rule(part), part.packed or {}
        given = (grad.dout[rows], call.q[rows], call.k[keys], call.v[keys], grad.out[rows])
        self.package._flash_attn_backward(
            *part.formed(*given, grad.lse[rows].T.contiguous()),
            *(sizes.get(f"{what}_{side}") for what in SIZES for side in "qk"),
            *part.formed(*into), call.softmax_scale,
            rule["causal"], rule["window_size_left"], rule["window_size_right"],
        )  # fmt: skip

    def _rule(self, part: FlashCall) -> dict[str, Any]:
        windowed = self.left >= 0
        return {
            "causal": part.causal and not windowed,
            "window_size_left": self.left,
            "window_size_right": 0 if windowed else -1,
        }

    def _calls(self, call: AttnCall) -> FlashCalls:
        key = "fa3", self.left, call.q.device
        if key not in call.table.cache:
            call.table.cache[key] = FlashCalls.of(call.table, self.left, call.q.device)
        return call.table.cache[key]


SIZES = ("cu_seqlens", "seqused", "max_seqlen")
"""In the order of the backward's arguments, which it names differently from version to version."""


def _placed(made: list[tuple[slice, Tensor, Tensor]], q: Tensor, dtype: torch.dtype) -> OutLse:
    """The results of calls on rows of their own; 0 and -inf elsewhere."""
    if len(made) == 1 and len(made[0][1]) == len(q):
        return made[0][1].to(dtype), made[0][2]
    out = q.new_empty(q.shape, dtype=dtype)
    lse = q.new_empty(q.shape[1::-1], dtype=acc_dtype(q.dtype)).T
    if sum(len(part) for _, part, _ in made) < len(q):
        out.zero_()
        lse.fill_(-torch.inf)
    for rows, part, part_lse in made:
        out[rows], lse[rows] = part, part_lse
    return out, lse


@lru_cache(maxsize=2)
def _merge(device: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """On a GPU one compiled kernel, as users of rings have it."""
    return torch.compile(merge_, dynamic=True) if device == "cuda" else merge_
