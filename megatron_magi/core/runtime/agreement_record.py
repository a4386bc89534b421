"""What ranks must share when they exchange rows: a call as 64 bytes, a difference in words."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron_magi.core.plan import AttnPlan

PLAN_FIELDS = ("mask", "token layout", "head_shape", "config")
"""What a plan is a function of, in the order of the packed field hashes."""

KINDS = (
    "plan",
    "dist_attn",
    "backward of dist_attn",
    "undispatch",
    "backward of undispatch",
    "backward of dispatch",
    "shift_tokens",
    "backward of shift_tokens",
    "dist_max_logits",
)
"""Calls in which ranks meet, by their numbers in a record."""

DTYPES = tuple(x for x in vars(torch).values() if isinstance(x, torch.dtype))

RECORD_LEN = 8
"""int64 of one record: number, kind, digest, field hashes, shape, dtype, scale, extra."""

Records = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Call:
    """One call in which rows are exchanged, beside its plan: equal on every rank."""

    kind: str
    """One of KINDS."""
    shape: tuple[int, ...] = ()
    """What one row holds: [G, D, E] of keys and values, or a row's own dimensions."""
    dtype: torch.dtype | None = None
    scale: float = 0.0
    """softmax_scale."""
    extra: int = 0
    """The shift of tokens; of an attention: whether a gradient will be asked for."""


def record_of(call: Call, plan: AttnPlan, number: int) -> tuple[int, ...]:
    """RECORD_LEN int64: the ``number``-th call of its group."""
    return (
        number,
        KINDS.index(call.kind),
        _signed(plan.digest),
        _signed(_packed([plan.field_digests[name] for name in PLAN_FIELDS])),
        _signed(_packed_shape(call.shape)),
        -1 if call.dtype is None else DTYPES.index(call.dtype),
        *struct.unpack("q", struct.pack("d", call.scale)),
        _signed(call.extra & 0xFFFFFFFFFFFFFFFF),
    )


def differing_ranks(records: Records) -> list[int]:
    """Ranks whose record is not rank 0's; records [ranks, RECORD_LEN]."""
    return [int(rank) for rank in np.flatnonzero((records != records[0]).any(axis=1))]


def describe_difference(records: Records, members: str, rank: int) -> str:
    """One error for all ranks: who differs in what, and what to do."""
    ranks = differing_ranks(records)
    other = ranks[0]
    whose = f"seen by rank {rank}"
    if (records[:, 1] != records[0, 1]).any():
        return (
            f"{members} must make the same calls in the same order; call {records[0, 0]} of this "
            f"group is {_kind(records[0])} on rank 0 and {_kind(records[other])} on rank {other} "
            f"({whose}); let every rank take the same batches through the same layers"
        )
    plan_fields = _differing_plan_fields(records)
    if (records[:, 2] != records[0, 2]).any():
        return (
            f"{members} must plan the same thing; ranks {ranks} differ from rank 0 in "
            f"{', '.join(plan_fields) or 'the planner version'} ({_kind(records[0])}, call "
            f"{records[0, 0]} of this group, {whose}); give every rank the same mask, config and "
            f"package version"
        )
    return (
        f"{members} must pass the same shapes, dtype and numbers to {_kind(records[0])}; ranks "
        f"{ranks} differ from rank 0: rank 0 has {_content(records[0])}, rank {other} has "
        f"{_content(records[other])} (call {records[0, 0]} of this group, {whose}); give every "
        f"rank the same model config and arguments"
    )


def _differing_plan_fields(records: Records) -> list[str]:
    changed = int(np.bitwise_or.reduce(records[:, 3] ^ records[0, 3])) & 0xFFFFFFFFFFFFFFFF
    shifts = range(48, -1, -16)
    return [name for name, s in zip(PLAN_FIELDS, shifts, strict=True) if changed >> s & 0xFFFF]


def _kind(record: Records) -> str:
    return KINDS[int(record[1])]


def _content(record: Records) -> str:
    """The parts of a call in words, e.g. row [2, 64, 64], float32, softmax_scale 0.25."""
    packed = int(record[4]) & 0xFFFFFFFFFFFFFFFF
    dims = [packed >> shift & 0xFFFF for shift in (48, 32, 16, 0)]
    parts = [f"row {[d - 1 for d in dims if d]}"]
    if record[5] >= 0:
        parts.append(str(DTYPES[int(record[5])]))
    (scale,) = struct.unpack("d", struct.pack("q", int(record[6])))
    if scale:
        parts.append(f"softmax_scale {scale:g}")
    kind = _kind(record)
    if "shift_tokens" in kind:
        parts.append(f"shift {int(record[7])}")
    elif "undispatch" in kind:
        parts.append(f"is_partial_grad {bool(record[7])}")
    elif kind == "dist_attn":
        parts.append("a gradient to come" if record[7] else "no gradient to come")
    return ", ".join(parts)


def _packed_shape(shape: Sequence[int]) -> int:
    """Up to four dimensions below 65535, readable again; anything else as a hash."""
    if len(shape) <= 4 and all(d < 0xFFFF for d in shape):
        return _packed([0] * (4 - len(shape)) + [d + 1 for d in shape])
    return hash(tuple(shape)) & 0xFFFFFFFFFFFFFFFF


def _packed(values: Sequence[int]) -> int:
    packed = 0
    for value in values:
        packed = packed << 16 | (value & 0xFFFF)
    return packed


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
