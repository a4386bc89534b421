"""Call signatures: one call in 64 bytes, and the error text for signatures that differ."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron_magi.core.plan import AttnPlan

PLAN_FIELDS = ("mask", "token layout", "head_shape", "config")
"""The inputs that determine a plan, in the order of the packed field hashes. In cross-attention
"token layout" stands for the layouts of queries and keys."""

KINDS = (
    "plan",
    "dist_attn",
    "backward of dist_attn",
    "undispatch",
    "backward of undispatch",
    "backward of dispatch",
    "shift_tokens",
    "backward of shift_tokens",
    "dist_attn_and_max_logits",
    "batch",
)
"""The kinds of call that ranks compare; the index of a kind is its number in a signature."""

DTYPES = tuple(x for x in vars(torch).values() if isinstance(x, torch.dtype))

SIGNATURE_LEN = 8
"""int64 values in a signature: number, kind, digest, field hashes, shape, dtype, scale, extra."""

SINK_BITS = 0b110
"""The bits of attention's ``extra`` that say which sinks it has: the dimensions of
``AttnCall.sink_lse``, or 0."""

SINKS = {1 << 1: "shared sinks", 2 << 1: "sinks per token"}
"""Meaning of these bits."""

ATTN_BITS = 1 | SINK_BITS
"""All bits of attention's ``extra``."""

Signature = tuple[int, ...]
PlanPart = tuple[int, int]
Signatures = npt.NDArray[np.int64]
"""[ranks, SIGNATURE_LEN] of one call, or [calls, SIGNATURE_LEN] of one rank."""


class Call(NamedTuple):
    """One call that exchanges rows, without its plan; equal on every rank.

    It is a tuple, because every call of a model creates one and tuples are cheap.
    """

    kind: str
    """One of KINDS."""
    shape: tuple[int, ...] = ()
    """Shape of one row: [G, D, E] of keys and values, or a row's own dimensions."""
    dtype: torch.dtype | None = None
    scale: float = 0.0
    """The softmax_scale of attention."""
    extra: int = 0
    """The shift of tokens; the number of a batch; is_partial_grad of undispatch; for attention,
    whether a gradient will be asked for (1), and which sinks there are (SINK_BITS)."""
    softcap: float = 0.0
    """The softcap of attention. It shares a number of the signature with ``extra``."""


def signature_of(call: Call, plan: PlanPart, number: int) -> Signature:
    """SIGNATURE_LEN integers that describe the ``number``-th call of its group."""
    kind, *rest = _of_call(*call)
    return (number, kind, *plan, *rest)


def plan_part(plan: AttnPlan) -> PlanPart:
    """A plan's part of every signature: its digest and the packed digests of its fields."""
    of_fields = plan.field_digests
    # Other bits of the keys' layout, because that of the queries may be the same.
    key_layout = of_fields.get("key layout", 0) >> 16
    layout = of_fields["token layout"] ^ key_layout
    fields = [(of_fields | {"token layout": layout})[name] for name in PLAN_FIELDS]
    return _signed(plan.digest), _signed(_packed(fields))


@lru_cache(maxsize=4096)  # a model makes the same calls again and again
def _of_call(
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    scale: float,
    extra: int,
    softcap: float,
) -> tuple[int, ...]:
    return (
        KINDS.index(kind),
        _signed(_packed_shape(shape)),
        -1 if dtype is None else DTYPES.index(dtype),
        _bits_of(scale),
        # A softcap comes with an extra of three bits, and gives it its own last ones.
        _signed(extra & 0xFFFFFFFFFFFFFFFF) | _bits_of(softcap) & ~ATTN_BITS,
    )


def _bits_of(number: float) -> int:
    """Adding 0.0 turns -0.0 into 0.0: the two are equal, so the cache cannot tell them apart."""
    return int(struct.unpack("q", struct.pack("d", number + 0.0))[0])


def _number_of(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])


def differing_ranks(signatures: Signatures) -> list[int]:
    """Ranks whose signature differs from rank 0's; signatures [ranks, SIGNATURE_LEN]."""
    return [int(rank) for rank in np.flatnonzero((signatures != signatures[0]).any(axis=1))]


def describe_difference(
    signatures: Signatures, members: str, rank: int, job_ranks: Sequence[int] = ()
) -> str:
    """The text of the error that all ranks raise: who differs, in what, and what to do.

    Args:
        signatures: [ranks, SIGNATURE_LEN], one call of every rank of the group.
        rank: of the job, of the process that raises.
        job_ranks: the group's ranks as the job numbers them; default: as the group does.
    """
    of_job = job_ranks or range(len(signatures))
    differing = differing_ranks(signatures)
    first, other = signatures[0], signatures[differing[0]]
    rank_0, rank_1 = of_job[0], of_job[differing[0]]
    ranks = [of_job[each] for each in differing]
    kind, call = _kind(first), f"call {first[0]} of this group"
    whose = f"seen by rank {rank}"
    if (signatures[:, 1] != first[1]).any():
        return (
            f"{members} must make the same calls in the same order; {call} is {kind} on rank "
            f"{rank_0} and {_kind(other)} on rank {rank_1} ({whose}); let every rank take the same "
            f"batches through the same layers"
        )
    plan_fields = _differing_plan_fields(signatures)
    if (signatures[:, 2] != first[2]).any():
        return (
            f"{members} must plan the same thing; ranks {ranks} differ from rank {rank_0} "
            f"in {', '.join(plan_fields) or 'the planner version'} ({kind}, {call}, {whose}); give "
            f"every rank the same mask, config and package version"
        )
    if kind == "batch":
        return (
            f"{members} must take the same batch; ranks {ranks} hold other tokens, or another "
            f"batch_id, than rank {rank_0} ({call}, {whose}); let every rank read the same data in "
            f"the same order, let all of them leave out a batch that one leaves out, and check "
            f"that every node's copy of the data is whole"
        )
    return (
        f"{members} must pass the same shapes, dtype and numbers to {kind}; ranks {ranks} differ "
        f"from rank {rank_0}: rank {rank_0} has {_content(first)}, rank {rank_1} has "
        f"{_content(other)} ({call}, {whose}); give every rank the same model config "
        f"and arguments"
    )


def _differing_plan_fields(signatures: Signatures) -> list[str]:
    changed = int(np.bitwise_or.reduce(signatures[:, 3] ^ signatures[0, 3])) & 0xFFFFFFFFFFFFFFFF
    shifts = range(48, -1, -16)
    return [name for name, s in zip(PLAN_FIELDS, shifts, strict=True) if changed >> s & 0xFFFF]


def _kind(signature: Signatures) -> str:
    return KINDS[int(signature[1])]


def _content(signature: Signatures) -> str:
    """The parts of a call in words, e.g. row [2, 64, 64], float32, softmax_scale 0.25."""
    packed = int(signature[4]) & 0xFFFFFFFFFFFFFFFF
    dims = [packed >> shift & 0xFFFF for shift in (48, 32, 16, 0)]
    parts = [f"row {[d - 1 for d in dims if d]}"]
    if signature[5] >= 0:
        parts.append(str(DTYPES[int(signature[5])]))
    scale, kind, extra = _number_of(int(signature[6])), _kind(signature), int(signature[7])
    if scale:
        parts.append(f"softmax_scale {scale:g}")
    if "dist_attn" in kind and (softcap := _number_of(extra & ~ATTN_BITS)):
        parts.append(f"softcap {softcap:g}")
    if "shift_tokens" in kind:
        parts.append(f"shift {extra}")
    elif "undispatch" in kind:
        parts.append(f"is_partial_grad {bool(extra)}")
    elif kind in ("dist_attn", "dist_attn_and_max_logits"):
        if sinks := SINKS.get(extra & SINK_BITS):
            parts.append(sinks)
        parts.append("a gradient to come" if extra & 1 else "no gradient to come")
    return ", ".join(parts)


def _packed_shape(shape: Sequence[int]) -> int:
    """Up to four dimensions below 65535, from which they can be read again; otherwise a hash."""
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
