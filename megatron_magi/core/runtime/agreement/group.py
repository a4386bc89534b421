"""State of a group's comparison, and the error if its ranks differ."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.runtime.agreement.channel import Channel
from megatron_magi.core.runtime.agreement.signature import (
    Call,
    PlanPart,
    describe_difference,
    plan_part,
    signature_of,
)

MAX_PENDING = 32
"""How many gathers may be under way before a call waits for the oldest; a rank is then about 512
calls ahead."""
MAX_AGREED = 4096
"""How many plans are remembered as compared; a call with a forgotten plan waits again."""


class AgreementError(RuntimeError):
    """Ranks have different plans, make different calls, or a rank did not come."""


@dataclass
class GroupState:
    """One group's channel; the caller of a method or user of a field must hold ``lock``."""

    rank: int
    """Of this process in the job, as logs and launchers count."""
    members: str
    timeout_s: float
    channel: Channel | None = None
    failure: AgreementError | None = None
    """An error that the watcher found and no call has raised yet."""
    noted: OrderedDict[int, PlanPart] = field(default_factory=OrderedDict)
    """Digests of plans that were compared, with what signatures say about them, the latest last;
    at most MAX_AGREED. An lru_cache would keep the plans alive, and cannot say what it holds."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    job_ranks: Sequence[int] = ()
    """The group's ranks as the job numbers them; (): as the group does."""

    def __del__(self) -> None:
        self.retire()

    def note_plan(self, plan: AttnPlan) -> PlanPart:
        """This plan's part of a signature; later calls with the plan do not wait.

        The caller must have looked whether the plan was noted before, and must wait if it was not.
        """
        part = self.noted.get(plan.digest)
        if part is None:
            part = self.noted[plan.digest] = plan_part(plan)
            if len(self.noted) > MAX_AGREED:
                self.noted.popitem(last=False)
        self.noted.move_to_end(plan.digest)
        return part

    def post(self, call: Call, plan: PlanPart, *, at_once: bool) -> None:
        """Append the next call, and send it at once or together with later ones.

        Raises:
            AgreementError: a call of another thread failed meanwhile and closed the channel.
        """
        if self.channel is None:
            raise AgreementError(
                f"calls on one group must come from one thread at a time; a call of another thread "
                f"of rank {self.rank} failed while this one began; give each thread a group of its "
                f"own"
            )
        self.channel.post(signature_of(call, plan, self.channel.streams.num_calls))
        if at_once and self.channel.streams.unsent:
            self.channel.send()

    def look(self, timeout_s: float) -> None:
        """Take in what has arrived; wait only if MAX_PENDING gathers are under way."""
        if self.failure is None and (self.channel is None or not self.channel.pending):
            return
        self._raise_failure()
        self._take_ready()
        while self.channel is not None and len(self.channel.pending) >= MAX_PENDING:
            self._receive(self.channel, timeout_s)

    def finish(self, timeout_s: float) -> None:
        """Wait until every rank has made the calls that this one has made, and they are equal."""
        self._raise_failure()
        while self.channel is not None:
            self.channel.send_rest()
            if not self.channel.pending:
                return
            self._receive(self.channel, timeout_s)

    def serve(self) -> None:
        """For the watcher: take in what has arrived, and send what no call has sent yet."""
        try:
            self._take_ready()
            # One gather at a time: while one is unanswered, only full batches are sent.
            if self.channel is not None and not self.channel.pending:
                self.channel.send_rest()
        except AgreementError as error:
            self.failure = error

    def close(self) -> None:
        """End the channel after an error; the next call opens another one."""
        channel, self.channel = self.channel, None
        self.noted.clear()
        if channel is not None:
            channel.close()

    def retire(self) -> None:
        """End the channel with its group, after the other ranks have received all its calls."""
        with self.lock:
            channel, self.channel = self.channel, None
            self.noted.clear()
            if channel is not None:
                channel.retire()

    def _take_ready(self) -> None:
        while self.channel is not None and self.channel.is_ready():
            self._receive(self.channel, self.timeout_s)

    def _raise_failure(self) -> None:
        """Raise what the watcher found, once."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _receive(self, channel: Channel, timeout_s: float) -> None:
        """Take in the oldest gather. After an error the channel is closed: other gathers under way
        are dropped, and the next call opens a new channel, at the same call on every rank."""
        try:
            difference = channel.receive(timeout_s)
        except RuntimeError as error:
            self.close()
            raise AgreementError(
                f"all {self.members} must make the same calls; a rank did not come within "
                f"{timeout_s:.0f} s, or is gone (seen by rank {self.rank}); look for the first "
                f"error in the other ranks' logs, check that every rank takes the same number of "
                f"batches, or raise MagiConfig.agreement_timeout_s ({error})"
            ) from None  # its text is in the line; a second traceback would say no more
        if difference is not None:
            self.close()
            raise AgreementError(
                describe_difference(difference, self.members, self.rank, self.job_ranks)
            )
