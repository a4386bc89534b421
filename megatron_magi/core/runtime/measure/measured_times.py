"""The times of a plan's stages on this machine, to be compared with the predicted ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.core.comm.node_cast import cast_rows
from megatron_magi.core.comm.process_group import CpGroup, group_rank, resolve_group
from megatron_magi.core.comm.transport_choice import transport_for
from megatron_magi.core.kernel.backend import AttnBackend, AttnCall, GradCall, acc_dtype
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.widths import widths_of
from megatron_magi.core.plan import AttnPlan, StageTimes
from megatron_magi.core.plan.attn_plan import check_plan
from megatron_magi.core.runtime.dist_attn import dist_attn
from megatron_magi.core.runtime.measure.random_inputs import random_qkv
from megatron_magi.core.runtime.measure.stopwatch import least_seconds
from megatron_magi.core.runtime.prepared import (
    PreparedPlan,
    PreparedStage,
    is_used,
    numbered,
    prepared_for,
)
from megatron_magi.core.runtime.token_dispatch import check_group
from megatron_magi.core.tensor_checks import device as checked_device

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MeasuredTimes:
    """One layer on this machine, in microseconds, with random tensors."""

    receive: Times = field(repr=False)
    """[cp_size, num_stages]: the exchange before each stage of the forward, with nothing beside
    it; 0 where there is none."""
    compute: Times = field(repr=False)
    """[cp_size, num_stages]: each forward stage's kernel, with nothing beside it."""
    forward: Times = field(repr=False)
    """[cp_size]: the whole forward, whose stages overlap."""
    backward: Times = field(repr=False)
    """[cp_size]: the whole backward: forward and backward together, less the forward."""

    @property
    def forward_us(self) -> float:
        """The forward of the slowest rank."""
        return float(self.forward.max())

    @property
    def backward_us(self) -> float:
        """The backward of the slowest rank."""
        return float(self.backward.max())


def measured_times(plan: AttnPlan, cp_group: CpGroup, device: torch.device | str) -> MeasuredTimes:
    """The times of one layer of a plan on every rank; compare them with ``predict_times(plan)``.

    All ranks of the group call it together.

    Args:
        plan: of any mask.
        cp_group: the group, a mesh, or None for one rank.
        device: that attends.

    Raises:
        TypeError, ValueError: no plan, or a group that does not fit it.

    Cost: 13 forward and 6 backward passes of one layer, and 6 runs of each exchange and of each
        kernel of the forward alone; the host waits for each.
    """
    check_group(plan, cp_group)
    where = numbered(checked_device(device))
    group = resolve_group(cp_group)
    probe = _Probe(plan, group_rank(cp_group), where)
    mine = (probe.receive(group), probe.forward_stages(), *probe.layer(cp_group))
    everyone = [mine]
    if group is not None:
        everyone = [mine] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    of_ranks = zip(*everyone, strict=True)
    return MeasuredTimes(*(np.array(times, dtype=np.float64) for times in of_ranks))


def kernel_times(plan: AttnPlan, rank: int, device: torch.device | str) -> tuple[float, float]:
    """Microseconds of all forward and of all backward kernels of a rank, one after the other and
    without any exchange. No other rank needs to be there.

    Raises:
        TypeError, ValueError: no plan, or a rank outside it.
    """
    check_plan(plan)
    probe = _Probe(plan, rank, numbered(checked_device(device)))
    return sum(probe.forward_stages()), probe.backward_stages()


class _Probe:
    """Runs parts of one rank's layer on random tensors."""

    def __init__(self, plan: AttnPlan, rank: int, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.ready: PreparedPlan = prepared_for(plan, rank, device)
        self.q, self.k, self.v = random_qkv(plan.head_shape, plan.layout.num_local_tokens, device)
        self.backend: AttnBackend = select_backend(
            plan.config.kernel_backend, device, self.q.dtype, widths_of(self.q, self.v)
        )

    def receive(self, group: dist.ProcessGroup | None) -> list[float]:
        """Microseconds of the exchange before each forward stage. All ranks call it."""
        if group is None:
            return self._of_stages(lambda stage: None)
        mover = transport_for(self.plan, group, self.k)
        rows = self.k, self.v

        def exchange(stage: PreparedStage) -> Callable[[], object] | None:
            cast = stage.cast
            return None if cast is None else lambda: cast_rows(rows, cast, mover).wait()

        return self._of_stages(exchange)

    def forward_stages(self) -> list[float]:
        """Microseconds of each forward stage's kernel, whose keys lie in a buffer already."""
        dtype = acc_dtype(self.q.dtype) if self.ready.merges else self.q.dtype

        def attend(stage: PreparedStage) -> Callable[[], object] | None:
            if not stage.sees:
                return None
            call = self._call(stage)
            return lambda: self.backend.forward(call, out_dtype=dtype)

        return self._of_stages(attend)

    def backward_stages(self) -> float:
        """Microseconds of all backward stages' kernels together, delta included."""
        out = torch.zeros_like(self.q[..., :1]).expand(*self.q.shape[:2], self.v.shape[-1])
        out = out.contiguous()
        lse = out.new_full(self.q.shape[:2], 8.0, dtype=acc_dtype(self.q.dtype))
        calls = [self._call(stage) for stage in self.ready.backward if stage.sees]

        def run() -> None:
            delta = self.backend.delta(out, out, lse.dtype)
            dq = torch.zeros_like(self.q, dtype=lse.dtype)
            for call in calls:
                grad = GradCall(
                    out, lse, delta, dq=dq, deterministic=self.plan.config.deterministic
                )
                self.backend.backward(call, grad)

        return 1e6 * least_seconds(run, self.device)

    def layer(self, cp_group: CpGroup) -> tuple[float, float]:
        """Microseconds of the whole forward and of the whole backward. All ranks call it."""
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))

        def forward() -> Tensor:
            return dist_attn(q, k, v, self.plan, cp_group)[0]

        out = forward()
        both = least_seconds(
            lambda: torch.autograd.grad(forward(), (q, k, v), out.detach()), self.device
        )
        alone = least_seconds(forward, self.device)
        return 1e6 * alone, 1e6 * max(both - alone, 0.0)

    def _call(self, stage: PreparedStage) -> AttnCall:
        _, k, v = random_qkv(self.plan.head_shape, stage.table.num_k, self.device)
        return AttnCall(self.q, k, v, stage.table, self.plan.head_shape.head_dim**-0.5)

    def _of_stages(
        self, work: Callable[[PreparedStage], Callable[[], object] | None]
    ) -> list[float]:
        """Microseconds of the work of each planned stage; 0 for a stage without work."""
        ready = iter(self.ready.forward)
        times = []
        for planned in self.ready.view.forward_stages:
            run = work(next(ready)) if is_used(planned) else None
            times.append(0.0 if run is None else 1e6 * least_seconds(run, self.device))
        return times


def times_text(predicted: StageTimes, measured: MeasuredTimes) -> str:
    """One line: forward and backward of the slowest rank, and its forward's stages, each as the
    planner predicted it and as it was measured, in microseconds."""
    rank = int(measured.forward.argmax())
    receive_start, receive_end, compute_start, compute_end = predicted.forward[rank].T
    stages = zip(
        receive_end - receive_start,
        measured.receive[rank],
        compute_end - compute_start,
        measured.compute[rank],
        strict=True,
    )
    parts = [f"receive {a:.0f} / {b:.0f}, compute {c:.0f} / {d:.0f}" for a, b, c, d in stages]
    return (
        f"predicted / measured us: forward {predicted.forward_us:.0f} / {measured.forward_us:.0f}, "
        f"backward {predicted.backward_us:.0f} / {measured.backward_us:.0f}; forward stages of "
        f"rank {rank}, each alone: {'; '.join(parts)}"
    )
