"""Ranks compare what they planned before they exchange a row.

Every dispatch call exchanges 16 bytes over a CPU group, asynchronously and whatever the local
cache says, so a rank with a cache hit and one with a miss meet in the same exchange. The first
cast waits for it. A disagreement is then one error on every rank, where a mismatched all-to-all
would hang.

Ranks that exchange no rows but work on the same batch (tensor-parallel ranks, pipeline stages)
compare too, in a group that is opened for it: nobody waits there before the end of a step, because
a later stage plans only when the earlier one has sent it something.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from megatron_magi.core.comm.process_group import CpGroup, resolve_group
from megatron_magi.core.kernel.calls import one_graph_break
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.plan.attn_plan import check_plan

FIELDS = ("mask", "dispatch", "head_shape", "config")
"""What a plan is a function of, in the order of the exchanged field hashes."""

MAX_PENDING = 256
"""Comparisons under way before a dispatch waits for the oldest."""
MAX_AGREED = 4096
"""Plans remembered as compared; one that was forgotten is compared again, on all ranks alike."""


class AgreementError(RuntimeError):
    """Ranks planned different things, or a rank did not come."""


@dataclass
class _Exchange:
    work: dist.Work
    gathered: list[Tensor]
    timeout_s: float


@dataclass
class _GroupState:
    cpu_group: dist.ProcessGroupGloo
    members: str = "context-parallel ranks"
    pending: deque[_Exchange] = field(default_factory=deque)
    agreed: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Digests of plans that were compared, the latest last; bounded, equal on every rank."""


_states: WeakKeyDictionary[dist.ProcessGroup, _GroupState] = WeakKeyDictionary()
_num_made: dict[tuple[int, ...], int] = {}


@one_graph_break
def agree(plan: AttnPlan, cp_group: CpGroup) -> None:
    """Start comparing this plan with the other ranks'; returns at once.

    ``dispatch`` calls it. Ranks that use a plan without dispatching (middle pipeline stages) call
    it themselves, once for every time the others dispatch.
    """
    check_plan(plan)
    group = resolve_group(cp_group)
    if group is None or dist.get_world_size(group) == 1:
        return
    state = _state(group, plan.config.agreement_timeout_s)
    if len(state.pending) >= MAX_PENDING:  # somebody dispatches and never attends
        _finish_oldest(state, dist.get_rank(group))
    _start(plan, group, state)
    state.agreed[plan.digest] = None
    state.agreed.move_to_end(plan.digest)
    if len(state.agreed) > MAX_AGREED:
        state.agreed.popitem(last=False)


def ensure_agreed(plan: AttnPlan, cp_group: CpGroup) -> None:
    """Wait until all started comparisons are done and equal.

    Raises:
        AgreementError: naming the ranks and the field that differ, or that a rank did not come
            within ``agreement_timeout_s``. Raised on every rank.
    """
    group = resolve_group(cp_group)
    if group is None or dist.get_world_size(group) == 1:
        return
    if plan.digest not in _state(group, plan.config.agreement_timeout_s).agreed:
        agree(plan, group)
    state = _states[group]
    _finish_all(state, dist.get_rank(group))


def open_agreement(group: dist.ProcessGroup, members: str, timeout_s: float) -> None:
    """Let the ranks of ``group`` compare their plans from now on; all of them call it.

    Args:
        members: What an error calls them, e.g. "tensor-parallel ranks".
        timeout_s: How long to wait for the others, here and when a comparison is finished.
    """
    if group not in _states:
        _states[group] = _GroupState(_cpu_group(group, timeout_s), members)


def agree_later(plan: AttnPlan, group: dist.ProcessGroup) -> None:
    """Start comparing this plan in an opened group, and look at older comparisons that are done.

    Never waits (unless MAX_PENDING comparisons are under way). Nothing happens in a group that was
    not opened. All ranks of the group call it equally often.

    Raises:
        AgreementError: an older plan differs.
    """
    state = _states.get(group)
    if state is None:
        return
    while state.pending and (
        state.pending[0].work.is_completed() or len(state.pending) >= MAX_PENDING
    ):
        _finish_oldest(state, dist.get_rank(group))
    _start(plan, group, state)


def finish_agreement(group: dist.ProcessGroup) -> None:
    """Wait for every comparison in an opened group; before what was computed is used.

    Raises:
        AgreementError: as `ensure_agreed`.
    """
    if group in _states:
        _finish_all(_states[group], dist.get_rank(group))


def _start(plan: AttnPlan, group: dist.ProcessGroup, state: _GroupState) -> None:
    mine = fingerprint(plan)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work = state.cpu_group.allgather([gathered], [mine])  # type: ignore[attr-defined]
    state.pending.append(_Exchange(work, gathered, plan.config.agreement_timeout_s))


def _finish_all(state: _GroupState, rank: int) -> None:
    while state.pending:
        _finish_oldest(state, rank)


def _finish_oldest(state: _GroupState, rank: int) -> None:
    try:
        _finish(state.pending.popleft(), state.members, rank)
    except AgreementError:
        # Nothing that was compared since the last success counts, nor fails a later step.
        state.pending.clear()
        state.agreed.clear()
        raise


def fingerprint(plan: AttnPlan) -> Tensor:
    """16 bytes, int64 [2]: the plan's digest and four 16-bit hashes, one per field."""
    packed = 0
    for name in FIELDS:
        packed = packed << 16 | (plan.field_digests[name] & 0xFFFF)
    return torch.tensor([_signed(plan.digest), _signed(packed)], dtype=torch.int64)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _state(group: dist.ProcessGroup, timeout_s: float) -> _GroupState:
    if group not in _states:
        _states[group] = _GroupState(_cpu_group(group, timeout_s))
    return _states[group]


def _cpu_group(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroupGloo:
    """A gloo group of the same ranks, made by its members alone.

    ``dist.new_group`` needs every rank of the job, and its local variant names the group by how
    many groups a process is in, which differs between pipeline stages. So the group is made on
    the job's store, under the members and the number of groups they made before.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    _num_made[ranks] = _num_made.get(ranks, 0) + 1
    prefix = f"megatron_magi/agreement/{'-'.join(map(str, ranks))}/{_num_made[ranks]}"
    store = PrefixStore(prefix, _get_default_store())
    try:
        return dist.ProcessGroupGloo(
            store, dist.get_rank(group), len(ranks), timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        raise AgreementError(
            f"all ranks {list(ranks)} must begin to compare plans (first batch, attach) within "
            f"{timeout_s:.0f} s of each other, and one did not come; look for the first error in "
            f"the other ranks' logs, or raise MagiConfig.agreement_timeout_s ({error})"
        ) from error


def _finish(exchange: _Exchange, members: str, rank: int) -> None:
    try:
        exchange.work.wait(timedelta(seconds=exchange.timeout_s))
    except RuntimeError as error:
        raise AgreementError(
            f"all {members} must dispatch the same batch; rank {rank} waited "
            f"{exchange.timeout_s:.0f} s and a rank did not come; look for the first error in the "
            f"other ranks' logs, check that every rank takes the same number of batches, or raise "
            f"MagiConfig.agreement_timeout_s ({error})"
        ) from error
    first = exchange.gathered[0]
    differing = [r for r, theirs in enumerate(exchange.gathered) if not torch.equal(theirs, first)]
    if differing:
        raise AgreementError(_describe(exchange.gathered, differing, members, rank))


def _describe(gathered: list[Tensor], differing: list[int], members: str, rank: int) -> str:
    def hashes(r: int) -> list[int]:
        packed = int(gathered[r][1]) & 0xFFFFFFFFFFFFFFFF
        return [packed >> shift & 0xFFFF for shift in (48, 32, 16, 0)]

    fields = [
        name
        for i, name in enumerate(FIELDS)
        if any(hashes(r)[i] != hashes(0)[i] for r in differing)
    ]
    return (
        f"{members} must plan the same thing; ranks {differing} differ from rank 0 in "
        f"{', '.join(fields) or 'the plan'} (seen by rank {rank}); give every rank the same mask, "
        f"config and package version"
    )
