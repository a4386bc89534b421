"""Ranks compare what they are about to do before rows change hands.

Every call that exchanges rows (attention, its backward, undispatch, shift_tokens, ...) sends 64
bytes over a CPU group: the call's number, its kind, the plan's digest, shapes, dtype and scale. A
disagreement is then one error on every rank, where a mismatched all-to-all would hang, abort or
bring other rows.

Who waits: with tensors on the CPU each exchange waits for its comparison. On a GPU the host runs
ahead of the device and must not stop, so only a plan's first exchange waits; the others are looked
at when the next one starts, and by a watcher when none does.

Ranks that exchange no rows but work on the same batch (tensor-parallel ranks, pipeline stages)
compare too, in a group that is opened for it: nobody waits there before the end of a step, because
a later stage plans only when the earlier one has sent it something.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_magi.core.comm.process_group import CpGroup, is_alive, resolve_group
from megatron_magi.core.kernel.autograd import one_graph_break
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.plan.attn_plan import check_plan
from megatron_magi.core.runtime.agreement_channel import (
    EXIT_PATIENCE_S,
    Channel,
    close_unfinished,
    leave,
    leave_running,
)
from megatron_magi.core.runtime.agreement_record import (
    Call,
    describe_difference,
    differing_ranks,
    record_of,
)
from megatron_magi.core.runtime.agreement_watcher import Watcher

CP_RANKS = "context-parallel ranks"
MAX_PENDING = 256
"""Comparisons under way before a call waits for the oldest."""
MAX_AGREED = 4096
"""Plans remembered as compared; one that was forgotten is waited for again."""


class AgreementError(RuntimeError):
    """Ranks planned or called different things, or a rank did not come."""


@dataclass
class GroupState:
    """What one group has compared; every field is used under ``lock``."""

    rank: int
    members: str
    timeout_s: float
    channel: Channel | None = None
    failure: AgreementError | None = None
    """Found by the watcher, not raised yet."""
    agreed: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Digests of plans that were compared, the latest last; bounded."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the channel; the next call opens another one."""
        with self.lock:
            if self.channel is not None:
                self.channel.close()
            self.channel = None
            self.agreed.clear()


_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()
_table_lock = threading.Lock()


@dataclass(frozen=True)
class Comparison:
    """A comparison that was started; ``wait`` comes before the exchange it is about."""

    state: GroupState | None
    timeout_s: float
    must_wait: bool

    def wait(self) -> None:
        """Until the ranks are known to agree, where the exchange may not start before that.

        Raises:
            AgreementError: naming the ranks and what differs, or that a rank did not come within
                ``agreement_timeout_s``. Raised on every rank.
        """
        if self.must_wait and self.state is not None:
            with self.state.lock:
                _finish_all(self.state, self.timeout_s)


def compare(call: Call, plan: AttnPlan, cp_group: CpGroup, device: torch.device) -> Comparison:
    """Start comparing this call with the other ranks'; the caller waits before it exchanges rows.

    Raises:
        AgreementError: an earlier call differed.

    Cost: 64 bytes per rank, over CPU sockets.
    """
    group = resolve_group(cp_group)
    timeout_s = plan.config.agreement_timeout_s
    if group is None or dist.get_world_size(group) == 1:
        return Comparison(None, timeout_s, False)
    state = _open_state(group, timeout_s)
    with state.lock:
        _look(state, timeout_s)
        is_new = plan.digest not in state.agreed
        _send(call, plan, state)
        state.agreed[plan.digest] = None
        state.agreed.move_to_end(plan.digest)
        if len(state.agreed) > MAX_AGREED:
            state.agreed.popitem(last=False)
    if device.type != "cpu":
        _watcher.start()
    return Comparison(state, timeout_s, is_new or device.type == "cpu")


def begin_comparing(plan: AttnPlan, cp_group: CpGroup) -> None:
    """Open the group's channel, so that a rank that fails later is noticed by the others at once.

    The first call of a group waits until all its ranks come; later ones return at once.

    Raises:
        AgreementError: a rank did not come within ``agreement_timeout_s``.
    """
    group = resolve_group(cp_group)
    if group is not None and dist.get_world_size(group) > 1:
        _open_state(group, plan.config.agreement_timeout_s)


@one_graph_break
def agree(plan: AttnPlan, cp_group: CpGroup) -> None:
    """Compare a plan with the other ranks' and wait for the result; every rank calls it.

    Calls that exchange rows do so themselves; this is for code that wants to know earlier.

    Raises:
        AgreementError: ranks planned different things, or did not all come.
    """
    check_plan(plan)
    compare(Call("plan"), plan, cp_group, torch.device("cpu")).wait()


def open_agreement(group: dist.ProcessGroup, members: str, timeout_s: float) -> None:
    """Let the ranks of ``group`` compare their plans from now on; all of them call it.

    Args:
        members: What an error calls them, e.g. "tensor-parallel ranks".
        timeout_s: How long to wait for the others, here and when a comparison is finished.
    """
    _open_state(group, timeout_s, members)


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
    timeout_s = plan.config.agreement_timeout_s
    _open_state(group, timeout_s, state.members)
    with state.lock:
        _look(state, timeout_s)
        _send(Call("plan"), plan, state)


def finish_agreement(group: dist.ProcessGroup) -> None:
    """Wait for every comparison of a group; before what was computed is used.

    Raises:
        AgreementError: ranks differ, or did not all come.
    """
    state = _states.get(group)
    if state is not None:
        with state.lock:
            _finish_all(state, state.timeout_s)


def _open_state(group: dist.ProcessGroup, timeout_s: float, members: str = CP_RANKS) -> GroupState:
    """The group's state with a channel; groups that were opened in threads do not wait for each
    other, because every group has a lock of its own."""
    state = _states.get(group)
    if state is not None and state.channel is not None:
        return state
    with _table_lock:
        state = _states.setdefault(group, GroupState(dist.get_rank(group), members, timeout_s))
        dead = [s for g, s in _states.items() if not is_alive(g)]
    for other in dead:
        other.close()
    close_unfinished()
    with state.lock:
        if state.channel is None and state.failure is None:
            state.channel = _open_channel(group, timeout_s)
    return state


def _open_channel(group: dist.ProcessGroup, timeout_s: float) -> Channel:
    try:
        return Channel(group, timeout_s)
    except RuntimeError as error:
        raise AgreementError(
            f"all ranks {dist.get_process_group_ranks(group)} must begin to compare plans (first "
            f"batch, attach) within {timeout_s:.0f} s of each other, and one did not come; look "
            f"for the first error in the other ranks' logs, or raise "
            f"MagiConfig.agreement_timeout_s ({error})"
        ) from error


def _send(call: Call, plan: AttnPlan, state: GroupState) -> None:
    assert state.channel is not None, "a group is opened before its first comparison"
    state.channel.send(record_of(call, plan, state.channel.num_sent))


def _look(state: GroupState, timeout_s: float) -> None:
    """Take in what has ended; wait only for the oldest of too many."""
    _raise_failure(state)
    _take_ready(state)
    while (channel := state.channel) is not None and len(channel.pending) >= MAX_PENDING:
        _receive(state, channel, timeout_s)


def _take_ready(state: GroupState) -> None:
    while (channel := state.channel) is not None and channel.is_ready():
        _receive(state, channel, state.timeout_s)


def _finish_all(state: GroupState, timeout_s: float) -> None:
    _raise_failure(state)
    while (channel := state.channel) is not None and channel.pending:
        _receive(state, channel, timeout_s)


def _raise_failure(state: GroupState) -> None:
    """What the watcher found, once."""
    failure, state.failure = state.failure, None
    if failure is not None:
        raise failure


def _receive(state: GroupState, channel: Channel, timeout_s: float) -> None:
    """Compare the oldest records. After an error the channel is closed: what else was under way
    does not count, and the next call opens another one, at the same place on every rank."""
    try:
        records = channel.receive(timeout_s)
    except RuntimeError as error:
        state.close()
        raise AgreementError(
            f"all {state.members} must make the same calls; a rank did not come within "
            f"{timeout_s:.0f} s, or is gone (seen by rank {state.rank}); look for the first error "
            f"in the other ranks' logs, check that every rank takes the same number of batches, or "
            f"raise MagiConfig.agreement_timeout_s ({error})"
        ) from error
    if differing_ranks(records):
        state.close()
        raise AgreementError(describe_difference(records, state.members, state.rank))


def _look_at_all() -> list[str]:
    """For the watcher: errors that nobody has raised yet."""
    with _table_lock:
        states = list(_states.values())
    for state in states:
        if state.failure is None and state.lock.acquire(blocking=False):
            try:
                _take_ready(state)
            except AgreementError as error:
                state.failure = error
            finally:
                state.lock.release()
    return [str(state.failure) for state in states if state.failure is not None]


def _close_all() -> None:
    """Before the interpreter ends: gloo's threads must not outlive it."""
    _watcher.stop()
    for state in list(_states.values()):
        if state.lock.acquire(timeout=EXIT_PATIENCE_S):
            state.close()
            state.lock.release()
        elif state.channel is not None:  # a daemon thread waits for the other ranks
            leave_running(state.channel)


def _forget_in_child() -> None:
    """After a fork: the threads of the channels, and of whoever held a lock, stayed behind."""
    global _states, _table_lock, _watcher
    for state in list(_states.values()):
        if state.channel is not None:
            leave(state.channel)
        state.channel, state.lock = None, threading.RLock()
    _states, _table_lock = WeakKeyDictionary(), threading.Lock()
    _watcher = Watcher(_look_at_all)


_watcher = Watcher(_look_at_all)
atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_in_child)
