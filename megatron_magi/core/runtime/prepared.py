"""Device tables of a plan: built once, kept with the plan and freed with it.

Plans remain values: they are compared, hashed and pickled without these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch

from megatron_magi.checks import integer, is_integer_like
from megatron_magi.core.comm.prepared_cast import (
    AnyCastPlan,
    AnyPreparedCast,
    PreparedCast,
    prepare_casts,
)
from megatron_magi.core.comm.process_group import CpGroup, group_rank
from megatron_magi.core.cuda.tables import DeviceTable, upload_together
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.kernel.work_lists import make_work_lists
from megatron_magi.core.plan import AttnPlan, RankPlan, StagePlan, TokenLayout
from megatron_magi.core.plan.attn_plan import check_plan
from megatron_magi.core.plan.saved_kv_index import saved_kv_index
from megatron_magi.core.tensor_checks import device as checked_device

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class PlanBuffer:
    """SavedKVIndex on one device."""

    number: int
    rows: slice
    index: DeviceTable | None


@dataclass(frozen=True, eq=False, slots=True)
class PreparedStage:
    """A stage on one device."""

    table: SliceTable
    """The slices of the stage; the backends keep their work lists in it."""
    cast: AnyPreparedCast | None
    """The exchange that fills the key buffer. None if the buffer is this rank's rows, or empty."""
    num_own: int
    """Number of own rows in the key buffer; they come first."""
    sees: bool
    """True if there is a slice at all."""
    kept: PlanBuffer | None
    """Where a backward finds the key buffer of this stage if its forward keeps what it receives;
    None without ``MagiConfig.keep_received_keys`` and in a stage that receives nothing."""


@dataclass(frozen=True, eq=False, slots=True)
class PreparedQueries:
    """A QueryStage on one device."""

    table: SliceTable
    cast: PreparedCast
    sees: bool
    """True if any queries arrive."""


@dataclass(frozen=True, eq=False, slots=True)
class PreparedPlan:
    """A rank's view of a plan on one device: all that a call needs besides its tensors."""

    view: RankPlan
    device: torch.device
    forward: tuple[PreparedStage, ...]
    """Stages in the order of the forward pass, without those that are empty on every rank."""
    backward: tuple[PreparedStage, ...]
    """Stages in the order of the backward pass, without the same empty ones. The one on own keys
    is the last one, if this rank has such a stage and attends in it."""
    merges: bool
    """True if a query row may attend in several stages of the forward pass."""
    is_alone: bool
    """True if one kernel call computes all gradients, and none is sent to another rank."""
    queries: PreparedQueries | None
    """Queries of other ranks that attend here; None: no rank sends any."""


def prepare(plan: AttnPlan, cp_group: CpGroup | int, device: torch.device | str) -> PreparedPlan:
    """This rank's view of a plan on a device, built when it is first asked for.

    Calls that attend prepare what they need themselves. A data loader that calls this function, in
    any thread, saves the first layer that work, including the work for the backward kernels.

    Args:
        cp_group: the group, a 1-D or 2-D mesh, None for one rank, or a rank's number.
        device: of the tensors that will attend. "cuda" means the current GPU of the thread. In a
            new thread that is the first GPU, so name the GPU by its number there.

    Raises:
        ValueError, TypeError: no plan, a rank outside it, or no such device.

    Cost: the first call uploads the tables of all exchanges together, and the work list of each
    kernel call, from pinned memory; the host does not wait.
    """
    check_plan(plan)
    if isinstance(cp_group, int) or is_integer_like(cp_group):
        rank = integer(cp_group, "cp_group as a rank", 0, plan.cp_size - 1)
    else:
        rank = group_rank(cp_group)
    ready = prepared_for(plan, rank, numbered(checked_device(device)))
    attended = [stage.table for i, stage in enumerate(ready.forward) if stage.sees or i == 0]
    seen = [stage.table for stage in ready.backward if stage.sees]
    if ready.queries is not None and ready.queries.sees:
        attended.append(ready.queries.table)
        seen.append(ready.queries.table)
    make_work_lists(attended, seen, plan.head_shape, plan.config, ready.device)
    return ready


def prepared_for(plan: AttnPlan, rank: int, device: torch.device) -> PreparedPlan:
    """``prepare`` without its checks and without work lists, which the first launch builds."""
    found: PreparedPlan | None = plan._kept.prepared.get((rank, device))
    if found is None:
        found = cached_on(plan, (rank, device), lambda: _prepare(plan, rank, device))
    return found


def cached_on(owner: AttnPlan | TokenLayout, key: Hashable, make: Callable[[], T]) -> T:
    """The value that is kept with a plan or a token layout under a key; ``make`` builds it when it
    is first asked for. If two threads build it, both get the result that was stored first. The
    value must not refer to its owner, or both would live for ever."""
    kept = owner._kept.prepared
    found: T | None = kept.get(key)
    return kept.setdefault(key, make()) if found is None else found


def numbered(device: torch.device) -> torch.device:
    """The device with its number, as tensors have it; "cuda" alone is the thread's current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _prepare(plan: AttnPlan, rank: int, device: torch.device) -> PreparedPlan:
    view = plan.rank_plan(rank)
    every = dict.fromkeys((*view.forward_stages, *view.stages))
    casts = dict.fromkeys(stage.cast for stage in every if stage.cast is not None)
    reduced = {stage.cast for stage in view.stages if stage.cast is not None}
    if view.queries is not None:
        casts[view.queries.cast] = None
        reduced.add(view.queries.cast)
    ready = prepare_casts(list(casts), device, reduced)
    cast_of = dict(zip(casts, ready, strict=True))
    kept = _kept(view, device) if plan.config.keep_received_keys else {}
    stages = {
        stage: PreparedStage(
            SliceTable(stage.slices, view.num_local_tokens, stage.num_keys, stage.left_rows),
            None if stage.cast is None else cast_of[stage.cast],
            stage.num_own,
            len(stage.slices) > 0,
            kept.get(stage),
        )
        for stage in every
    }
    own, *remote = view.stages
    return PreparedPlan(
        view,
        device,
        tuple(stages[stage] for stage in view.forward_stages if is_used(stage)),
        tuple(stages[stage] for stage in (*remote, own) if is_used(stage)),
        view.forward_merges,
        not remote and own.cast is None and view.queries is None,
        _queries(plan, view, cast_of),
    )


def _queries(
    plan: AttnPlan, view: RankPlan, cast_of: dict[AnyCastPlan, AnyPreparedCast]
) -> PreparedQueries | None:
    stage = view.queries
    if stage is None:
        return None
    cast = cast_of[stage.cast]
    assert isinstance(cast, PreparedCast), "queries go straight to the rank of the keys"
    table = SliceTable(stage.slices, cast.num_recv, plan.key_layout.num_local_tokens)
    return PreparedQueries(table, cast, cast.num_recv > 0)


def _kept(view: RankPlan, device: torch.device) -> dict[StagePlan, PlanBuffer]:
    places = saved_kv_index(view)
    indices = [place.index for place in places.values() if place.index is not None]
    tables = iter(upload_together(indices, device) if indices else ())
    made = {}
    for stage, place in places.items():
        rows = slice(place.start, place.start + place.num_rows)
        made[stage] = PlanBuffer(place.buffer, rows, None if place.index is None else next(tables))
    return made


def is_used(stage: StagePlan) -> bool:
    """A stage without keys and without a cast is empty on every rank."""
    return stage.num_keys > 0 or stage.cast is not None
