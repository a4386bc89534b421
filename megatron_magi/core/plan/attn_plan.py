"""AttnPlan: the one global value that every rank derives its work from."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, fields
from functools import cached_property
from typing import get_args

import numpy as np

from megatron_magi.checks import instance, integer, shown, word
from megatron_magi.config import ForwardMode, MagiConfig
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.mask.mask import check_mask
from megatron_magi.core.native import solver
from megatron_magi.core.plan.derived_cache import DerivedCache, cache_of, check_cache
from megatron_magi.core.plan.head_shape import HeadShape
from megatron_magi.core.plan.peer_rows import SlotRows, reads_peers, slot_rows
from megatron_magi.core.plan.query_stage import with_queries
from megatron_magi.core.plan.rank_plan import RankPlan, Staging, make_rank_plan
from megatron_magi.core.plan.token_layout import (
    Homes,
    Int32Array,
    Int64Array,
    TokenLayout,
    check_layout,
    ranks_per_node,
)

PLANNER_VERSION = 13
"""Part of every digest. Raise it whenever the same input may lead to another plan."""

FORWARD_MODES: tuple[ForwardMode, ...] = get_args(ForwardMode)
"""Forward modes, in the order of their numbers in csrc/planner/stages.h."""


def no_transfers() -> Int32Array:
    """Transfers of a plan that sends nothing."""
    return np.zeros((0, 5), np.int32)


@dataclass(frozen=True, eq=False)
class AttnPlan:
    """Work and exchanges of all ranks for one mask; equal on every rank.

    Plans are compared, hashed and agreed on by ``digest``. A pickle holds the mask's slices, the
    chunks' ranks and the transfers. A rank's view is derived on first use and kept per process.
    """

    mask: AttnMask
    layout: TokenLayout
    head_shape: HeadShape
    config: MagiConfig
    overlap_degree: int
    """Number of remote stages of the backward, and of a staged forward. 0: everything is received
    before one kernel call."""
    forward_mode: ForwardMode
    """How the forward uses the rows that it receives; see MagiConfig."""
    transfers: Int32Array = field(repr=False)
    """int32 [M, 5], read-only: (stage, dst, src, start, end), global rows, sorted."""
    loads: Int64Array = field(repr=False)
    """int64 [cp_size], read-only: the kernel tiles of each rank."""
    digest: int
    """64-bit hash of the fields below and the planner's version."""
    field_digests: dict[str, int] = field(repr=False)
    """64-bit hashes of mask, token layout, head_shape and config, which tell where ranks differ."""
    cross_layout: TokenLayout | None = None
    """In cross-attention, which rank owns which keys. None: keys are the queries' tokens."""
    query_transfers: Int32Array = field(default_factory=no_transfers, repr=False)
    """int32 [M, 5], read-only: as ``transfers``, but rows are queries, which attend at ``dst``, and
    whose outputs return to ``src``. Between two ranks either keys or queries are sent."""
    _kept: DerivedCache = field(default_factory=DerivedCache, repr=False)
    """Ranks' views and what devices hold of the plan; no part of the value."""

    def __post_init__(self) -> None:
        _check_fields(self)
        is_copy = self._kept.of is not None
        digest = self.digest
        if is_copy:  # with another mask, say, but the digest of the plan that it was made from
            digest, _ = digests(
                self.mask, self.layout, self.head_shape, self.config, self.cross_layout
            )
        transfers = solver.hash64(self.transfers.tobytes() + self.query_transfers.tobytes())
        derived = _digest((digest, self.overlap_degree, self.forward_mode, transfers))
        object.__setattr__(self, "_kept", cache_of(self._kept, derived))
        self.transfers.setflags(write=False)
        self.query_transfers.setflags(write=False)
        self.loads.setflags(write=False)

    @property
    def cp_size(self) -> int:
        return self.layout.cp_size

    @property
    def key_layout(self) -> TokenLayout:
        """Layout of the keys; ``layout`` in self-attention."""
        return self.layout if self.cross_layout is None else self.cross_layout

    @property
    def ranks_per_node(self) -> int:
        """Ranks that exchange rows inside a node; 0: links between nodes are not told apart."""
        return ranks_per_node(self.config, self.cp_size)

    @property
    def homes(self) -> Homes:
        """The layouts of queries and keys."""
        return Homes(self.layout, self.key_layout)

    @property
    def num_stages(self) -> int:
        """Number of stages of every rank, the one on own rows included."""
        return self.overlap_degree + 1

    @property
    def imbalance(self) -> float:
        """The largest load of a rank over the mean load; 1.0 for an empty mask."""
        total = int(self.loads.sum())
        return int(self.loads.max()) * self.cp_size / total if total else 1.0

    @property
    def rows_received(self) -> Int64Array:
        """int64 [cp_size]: key rows that each rank receives in all stages together."""
        rows = np.zeros(self.cp_size, np.int64)
        np.add.at(rows, self.transfers[:, 1], self.transfers[:, 4] - self.transfers[:, 3])
        return rows

    @cached_property
    def slot_rows(self) -> SlotRows:
        """The most rows that a rank holds ready for its peers in one exchange."""
        own = self.key_layout.num_local_tokens
        return slot_rows(self.transfers, self.cp_size, self.num_stages, own)

    def rank_plan(self, rank: int) -> RankPlan:
        """One rank's work and exchanges.

        Raises:
            ValueError: a rank outside the group.
        """
        self.layout.check_rank(rank)
        rank = int(rank)
        views: dict[int, RankPlan] = self._kept.rank_plans
        if rank not in views:
            per_node = self.ranks_per_node
            reads = reads_peers(self.config, self.cp_size, per_node)
            staging = Staging(self.overlap_degree, self.forward_mode, per_node, reads)
            view = make_rank_plan(self.mask, self.homes, self.transfers, rank, staging)
            views[rank] = with_queries(view, self.mask, self.homes, self.query_transfers)
        return views[rank]

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, AttnPlan) else NotImplemented

    def __hash__(self) -> int:
        return self.digest

    def __reduce__(self) -> tuple[object, ...]:
        return AttnPlan, tuple(getattr(self, f.name) for f in fields(self) if f.name != "_kept")


def digests(
    mask: AttnMask,
    layout: TokenLayout,
    head_shape: HeadShape,
    config: MagiConfig,
    cross_layout: TokenLayout | None = None,
) -> tuple[int, dict[str, int]]:
    """A plan's digest, and those of its fields; see AttnPlan."""
    of_fields = {
        "mask": mask.digest,
        "token layout": layout.digest,
        "head_shape": _digest(astuple(head_shape)),
        "config": _digest(astuple(config)),
    }
    if cross_layout is not None:
        of_fields["key layout"] = cross_layout.digest
    return _digest((PLANNER_VERSION, layout.cp_size, *of_fields.values())), of_fields


def check_inputs(
    mask: AttnMask,
    head_shape: HeadShape,
    config: MagiConfig,
    layout: TokenLayout | None,
    key_layout: TokenLayout | None = None,
) -> None:
    """Refuse values of other classes, before a digest of one of them is needed."""
    check_mask(mask)
    instance(
        head_shape, HeadShape, "head_shape", "pass HeadShape(num_heads_q, num_heads_kv, head_dim)"
    )
    instance(config, MagiConfig, "config", "pass MagiConfig(), or nothing for the defaults")
    for name, given in (("layout", layout), ("key_layout", key_layout)):
        if given is not None:
            check_layout(given, name)


def check_plan(value: object) -> None:
    """Refuse a value that is no AttnPlan; every function that takes a plan calls this."""
    if not isinstance(value, AttnPlan):
        instance(value, AttnPlan, "plan", "make one with megatron_magi.plan")


def _check_fields(plan: AttnPlan) -> None:
    check_inputs(plan.mask, plan.head_shape, plan.config, plan.layout)
    check_layout(plan.layout)
    if plan.cross_layout is not None:
        check_layout(plan.cross_layout, "cross_layout")
    integer(plan.overlap_degree, "overlap_degree", 0)
    word(plan.forward_mode, "forward_mode", FORWARD_MODES)
    integer(plan.digest, "digest", 0, 2**64 - 1)
    instance(plan.field_digests, dict, "field_digests", "plan with make_attn_plan")
    check_cache(plan._kept)
    for name, array, shape in (
        ("transfers", plan.transfers, (None, 5)),
        ("query_transfers", plan.query_transfers, (None, 5)),
        ("loads", plan.loads, (plan.layout.cp_size,)),
    ):
        instance(array, np.ndarray, name, "plan with make_attn_plan")
        if array.dtype.kind != "i" or array.shape[-1:] != shape[-1:] or array.ndim != len(shape):
            raise ValueError(
                f"{name} must be integers of the plan's shape, got {shown(array)}; "
                f"plan with make_attn_plan"
            )


def _digest(values: tuple[object, ...]) -> int:
    return int(solver.hash64(repr(values).encode()))
