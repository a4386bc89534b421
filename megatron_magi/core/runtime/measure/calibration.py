"""The rates of a cost table, measured on the machine that will train."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_magi.checks import instance
from megatron_magi.config import CostTable, MagiConfig
from megatron_magi.core.comm.node_cast import cast_rows
from megatron_magi.core.comm.process_group import (
    CpGroup,
    group_rank,
    mesh_ranks_per_node,
    resolve_group,
)
from megatron_magi.core.comm.transport_choice import transport_for
from megatron_magi.core.kernel.attention import flex_flash_attn_func
from megatron_magi.core.kernel.head_groups import AttnOptions
from megatron_magi.core.kernel.slice_table import slices_tensor
from megatron_magi.core.mask import builders
from megatron_magi.core.plan import HeadShape
from megatron_magi.core.runtime.measure.random_inputs import random_qkv
from megatron_magi.core.runtime.measure.stopwatch import least_seconds
from megatron_magi.core.runtime.plan_cache import plan_for
from megatron_magi.core.runtime.prepared import numbered, prepared_for
from megatron_magi.core.tensor_checks import device as checked_device

DIGITS = 2
"""Significant digits of a rate: it varies by percents from run to run, and plans should not."""
BACKWARD_WORK = 2.5
"""FLOPs of a backward over those of its forward."""


@dataclass(frozen=True)
class _Sizes:
    """How much is computed and moved."""

    tokens: int
    """Tokens of the attention call."""
    copied_mib: int
    """MiB of the copy."""
    rows: int
    """Rows that a rank sends to every other one."""


GPU_SIZES = _Sizes(tokens=8192, copied_mib=256, rows=4096)
CPU_SIZES = _Sizes(tokens=128, copied_mib=4, rows=64)


def measured_costs(
    cp_group: CpGroup,
    head_shape: HeadShape,
    config: MagiConfig | None = None,
    device: torch.device | str | None = None,
    agreeing: CpGroup = None,
) -> CostTable:
    """``config.costs`` with the rates of this machine: link, kernel, memory and a stage's latency.

    All ranks call it together, once, and use the result in their MagiConfig; it is part of every
    plan's digest. A run that must repeat another one bit by bit takes fixed costs instead, because
    measured costs may lead to other stages.

    Args:
        cp_group: the group, a mesh, or None for one rank, whose link is not measured.
        head_shape: of one tensor-parallel rank.
        config: its kernel and transport are measured, and its costs' other fields are kept. With
            several nodes, by ``costs.ranks_per_node`` or a 2-D mesh, link and latency are kept too.
            None: the default.
        device: that will attend. None: the current GPU, or the CPU without one.
        agreeing: all ranks that must have equal plans; all of them call. With pipeline stages or
            tensor parallelism they are more than a context-parallel group. None: ``cp_group``.

    Returns:
        Equal tables on all ranks: each rate is the median over the ranks, rounded to two
        significant digits.

    Raises:
        TypeError: no head shape or config.
        ValueError: on every rank, agreeing ranks of which some measured a link and others did not.

    Cost: less than a second on a GPU, after the kernels are loaded. Each rank sends 4,096 key and
        value rows (64 on the CPU) to every other one six times, and the host waits.
    """
    instance(
        head_shape, HeadShape, "head_shape", "pass HeadShape(query heads, key heads, head_dim)"
    )
    config = MagiConfig() if config is None else config
    instance(config, MagiConfig, "config", "pass a MagiConfig or None")
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    probe = _Probe(head_shape, config, numbered(checked_device(name)))
    rates = {"kernel_tflops": probe.kernel_tflops(), "memory_gib_s": probe.memory_gib_s()}
    group = resolve_group(cp_group)
    per_node = config.costs.ranks_per_node or mesh_ranks_per_node(cp_group)
    if group is not None and dist.get_world_size(group) > 1 and not per_node:
        rates["stage_latency_us"] = 1e6 * probe.cast_s(cp_group, 1)[0]
        seconds, received = probe.cast_s(cp_group, probe.sizes.rows)
        rates["link_gib_s"] = received / seconds / 2**30
    agreed: dict[str, Any] = dict(_agreed(rates, resolve_group(agreeing) or group))
    return replace(config.costs, **agreed)


def _agreed(rates: dict[str, float], group: dist.ProcessGroup | None) -> dict[str, float]:
    """Each rate's median over the ranks, rounded; equal on all of them."""
    everyone = [rates]
    if group is not None:
        everyone = [rates] * dist.get_world_size(group)
        dist.all_gather_object(everyone, rates, group=group)
    if any(one.keys() != rates.keys() for one in everyone):
        raise ValueError(
            f"ranks that agree must measure the same rates, got "
            f"{[sorted(one) for one in everyone]}; use context-parallel groups of one size and "
            f"equal configs"
        )
    middle = {name: statistics.median_low([one[name] for one in everyone]) for name in rates}
    return {name: float(f"{rate:.{DIGITS}g}") for name, rate in middle.items()}


class _Probe:
    """Measures on one device."""

    def __init__(self, head_shape: HeadShape, config: MagiConfig, device: torch.device) -> None:
        self.head_shape, self.config, self.device = head_shape, config, device
        self.sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES

    def kernel_tflops(self) -> float:
        """The rate of forward and backward together, over a causal mask."""
        shape, mask = self.head_shape, builders.causal(self.sizes.tokens)
        tensors = random_qkv(shape, self.sizes.tokens, self.device)
        q, k, v = (x.requires_grad_() for x in tensors)
        slices, config = slices_tensor(mask), self.config
        how: AttnOptions = {"backend": config.kernel_backend, "deterministic": config.deterministic}

        def run() -> None:
            out, _ = flex_flash_attn_func(q, k, v, slices=slices, **how)
            torch.autograd.grad(out, (q, k, v), out.detach())

        forward = 2 * shape.num_heads_q * (shape.head_dim + shape.value_dim) * mask.area()
        return (1 + BACKWARD_WORK) * forward / least_seconds(run, self.device) / 1e12

    def memory_gib_s(self) -> float:
        """The rate of a copy; the bytes that it reads and those that it writes both count."""
        source = torch.zeros(self.sizes.copied_mib << 20, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * len(source) / least_seconds(lambda: target.copy_(source), self.device) / 2**30

    def cast_s(self, cp_group: CpGroup, rows: int) -> tuple[float, int]:
        """Seconds of an exchange in which every rank receives ``rows`` key and value rows from
        every other one, and the bytes that this rank receives."""
        group = resolve_group(cp_group)
        mask = builders.full(rows * dist.get_world_size(group))
        transport = self.config.transport
        staged = MagiConfig(overlap_degree=1, forward_mode="staged", transport=transport)
        plan = plan_for(mask, cp_group, self.head_shape, staged)
        ready = prepared_for(plan, group_rank(cp_group), self.device)
        cast = ready.backward[0].cast
        assert cast is not None, "every row of a full mask sees every rank's keys"
        _, k, v = random_qkv(self.head_shape, plan.layout.num_local_tokens, self.device)
        mover = transport_for(plan, group, k)
        taken = least_seconds(lambda: cast_rows((k, v), cast, mover).wait(), self.device)
        received = int(plan.rows_received[group_rank(cp_group)])
        return taken, received * self.head_shape.kv_row_bytes
