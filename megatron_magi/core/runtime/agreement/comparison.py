"""Ranks compare what they are about to do before they exchange rows.

Every call that exchanges rows (attention, its backward, undispatch, shift_tokens, ...) has a
signature of 64 bytes: the call's number, its kind, the plan's digest, shapes, dtype and numbers.
Ranks gather each other's signatures over a CPU group. A disagreement then raises one error on every
rank. Without the comparison a mismatched all-to-all would hang, abort or deliver wrong rows.

With tensors on the CPU, each exchange waits for its comparison. On a GPU the host runs ahead of the
device and must not stop, so only a plan's first exchange waits. The signatures of later exchanges
are sent 16 at a time, or by a watcher within a second. They are compared when a later exchange
starts, or by the watcher when none does. ``stream.py`` explains why every gather that one
rank starts is started by all.

Ranks that exchange no rows but work on the same batch (tensor-parallel ranks, pipeline stages)
compare too, in a group that is opened for this. No rank waits there before the end of a step,
because a later pipeline stage plans only after the earlier one has sent it something.
"""

from __future__ import annotations

import atexit
import os
import threading
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_magi.core.comm.process_group import CpGroup, forget_stores, is_alive, resolve_group
from megatron_magi.core.comm.reduce_group import forget_communicators
from megatron_magi.core.comm.transport_choice import engines
from megatron_magi.core.kernel.autograd import one_graph_break
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.plan.attn_plan import check_plan
from megatron_magi.core.runtime.agreement.channel import (
    EXIT_PATIENCE_S,
    Channel,
    close_unfinished,
    forget_in_child,
    leave,
    leave_running,
)
from megatron_magi.core.runtime.agreement.group import AgreementError as AgreementError
from megatron_magi.core.runtime.agreement.group import GroupState
from megatron_magi.core.runtime.agreement.signature import Call, plan_part
from megatron_magi.core.runtime.agreement.watcher import Watcher

CP_RANKS = "context-parallel ranks"

_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()
_table_lock = threading.Lock()
"""Held while ``_states`` grows or is listed: threads open groups, and the watcher looks at all."""


@dataclass(frozen=True)
class Comparison:
    """A comparison that was started; call ``wait`` before the exchange that it is about."""

    state: GroupState | None
    timeout_s: float
    must_wait: bool

    def wait(self) -> None:
        """Wait until the ranks are known to agree, if the exchange may not start before that.

        Raises:
            AgreementError: ranks differ (the error names them and what differs), or one did not
                come within ``agreement_timeout_s``. It is raised on every rank.
        """
        if self.must_wait and self.state is not None:
            with self.state.lock:
                self.state.finish(self.timeout_s)


_NO_WAIT = Comparison(None, 0, False)


def compare(call: Call, plan: AttnPlan, cp_group: CpGroup, device: torch.device) -> Comparison:
    """Start to compare this call with the other ranks'; the caller waits before it exchanges rows.

    Raises:
        AgreementError: an earlier call differed.

    Cost: 64 bytes per rank over CPU sockets; on a GPU every 16th call sends them together.
    """
    timeout_s = plan.config.agreement_timeout_s
    state = _state_of(cp_group, timeout_s)
    if state is None:
        return _NO_WAIT
    with state.lock:
        state.look(timeout_s)
        must_wait = device.type == "cpu" or plan.digest not in state.noted
        state.post(call, state.note_plan(plan), at_once=must_wait)
    if device.type != "cpu":
        _watcher.start()
    return Comparison(state, timeout_s, True) if must_wait else _NO_WAIT


def begin_comparing(plan: AttnPlan, cp_group: CpGroup) -> None:
    """Open the group's channel, so that the other ranks notice at once if a rank fails later.

    The first call of a group waits until all its ranks have come; later calls return at once.

    Raises:
        AgreementError: a rank did not come within ``agreement_timeout_s``.
    """
    _state_of(cp_group, plan.config.agreement_timeout_s)


@one_graph_break
def agree(plan: AttnPlan, cp_group: CpGroup) -> None:
    """Compare a plan with the other ranks' and wait for the result; every rank calls it.

    Calls that exchange rows compare by themselves; this is for code that wants to know earlier.

    Raises:
        AgreementError: ranks have different plans, or did not all come.
    """
    check_plan(plan)
    compare(Call("plan"), plan, cp_group, torch.device("cpu")).wait()


def agree_on_batch(plan: AttnPlan, cp_group: CpGroup, batch_id: int, device: torch.device) -> None:
    """Compare which batch is dispatched by this plan; every rank calls it, once for a dispatch.

    Equal plans do not tell batches apart, e.g. of causal sequences of one length.

    Args:
        batch_id: 64 bits that tell this batch from others, e.g. a hash of its tokens.
        device: of its rows; on the CPU, and with a new plan, the call waits for the result.

    Raises:
        AgreementError: ranks have other batches or plans, or did not all come.
    """
    compare(Call("batch", extra=batch_id), plan, cp_group, device).wait()


def open_agreement(group: dist.ProcessGroup, members: str, timeout_s: float) -> None:
    """Let the ranks of ``group`` compare their plans from now on; all of them call it.

    Args:
        members: What an error calls the ranks, e.g. "tensor-parallel ranks".
        timeout_s: How long to wait for the others, here and when a comparison is finished.
    """
    _open_state(group, timeout_s, members)


def agree_later(plan: AttnPlan, group: dist.ProcessGroup) -> None:
    """Start to compare this plan in an opened group, and look at older comparisons that are done.

    The call never waits, unless MAX_PENDING gathers are under way. It does nothing in a group that
    was not opened. All ranks of the group call it equally often.

    Raises:
        AgreementError: an older plan differs.
    """
    state = _states.get(group)
    if state is None:
        return
    timeout_s = plan.config.agreement_timeout_s
    _open_state(group, timeout_s, state.members)
    with state.lock:
        state.look(timeout_s)
        # Sent at once, because there may be no watcher to send it later.
        state.post(Call("plan"), plan_part(plan), at_once=True)


def finish_agreement(group: dist.ProcessGroup) -> None:
    """Wait for every comparison of a group; call it before the computed results are used.

    Raises:
        AgreementError: ranks differ, or did not all come.
    """
    state = _states.get(group)
    if state is not None:
        with state.lock:
            state.finish(state.timeout_s)


def _state_of(cp_group: CpGroup, timeout_s: float) -> GroupState | None:
    """The state of a context-parallel group, opened if necessary; None if there is one rank."""
    group = resolve_group(cp_group)
    if group is None:
        return None
    state = _states.get(group)
    if state is not None and state.channel is not None:
        return state
    return None if dist.get_world_size(group) == 1 else _open_state(group, timeout_s)


def _open_state(group: dist.ProcessGroup, timeout_s: float, members: str = CP_RANKS) -> GroupState:
    """The group's state with a channel; groups that are opened in different threads do not wait
    for each other, because every group has its own lock."""
    state = _states.get(group)
    if state is not None and state.channel is not None:
        return state
    with _table_lock:
        ranks = tuple(dist.get_process_group_ranks(group))
        made = GroupState(dist.get_rank(), members, timeout_s, job_ranks=ranks)
        state = _states.setdefault(group, made)
        dead = [s for g, s in _states.items() if not is_alive(g)]
    for other in dead:
        other.retire()
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
        ) from None  # its text is in the line; a second traceback would say no more


def _look_at_all() -> list[str]:
    """For the watcher: errors that no call has raised yet. Unsent signatures are sent as well."""
    close_unfinished()
    with _table_lock:
        states = list(_states.values())
    for state in states:
        if state.failure is None and state.lock.acquire(blocking=False):
            try:
                state.serve()
            finally:
                state.lock.release()
    failures = [str(state.failure) for state in states if state.failure is not None]
    patience = max((state.timeout_s for state in states), default=0.0)
    late = [engine.overdue(patience) for engine in engines()]
    return failures + [text for text in late if text is not None]


def forget_groups() -> None:
    """End every channel and forget every group, after the job's groups were destroyed and before
    others are made in this process. Ranks that still wait in one of them get an error."""
    global _states
    with _table_lock:
        ended, _states = list(_states.values()), WeakKeyDictionary()
    for state in ended:
        with state.lock:
            state.close()
            state.failure = None
    close_unfinished(EXIT_PATIENCE_S)
    _watcher.start()  # it ends those in which another rank has not yet answered
    forget_stores()
    forget_communicators()


def leave_process_running() -> None:
    """Let the watcher report errors and not end the process, which somebody else restarts."""
    _watcher.ends_process = False


def _close_all() -> None:
    """Close every channel before the interpreter ends: gloo's threads must not outlive it."""
    _watcher.stop()
    for state in list(_states.values()):
        if state.lock.acquire(timeout=EXIT_PATIENCE_S):
            state.retire()
            state.lock.release()
        elif state.channel is not None:  # a daemon thread waits for the other ranks
            leave_running(state.channel)


def _forget_in_child() -> None:
    """Start afresh after a fork: the parent's threads, among them those of the channels and any
    that held a lock, do not exist in the child."""
    global _states, _table_lock, _watcher
    for state in list(_states.values()):
        if state.channel is not None:
            leave(state.channel)
        state.channel, state.lock = None, threading.RLock()
    forget_in_child()
    _states, _table_lock = WeakKeyDictionary(), threading.Lock()
    _watcher = Watcher(_look_at_all)


_watcher = Watcher(_look_at_all)
atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_in_child)
