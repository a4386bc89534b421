"""MagiAttention's configuration classes, and what of them reaches our engine.

Only two things change a plan: ``DispatchConfig.chunk_size`` and ``OverlapConfig.degree``. The rest
tunes MagiAttention's own algorithms; it is checked and has no effect here. Everything else
our engine can be told stands in ``DistAttnConfig.magi_config``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from typing import Any

from megatron_magi.checks import flag, instance, integer, number, optional_integer
from megatron_magi.config import MagiConfig

__all__ = [
    "AttnOverlapMode", "BSDispatchAlg", "BTPDispatchAlg", "BatchToppHeapDispatchAlg",
    "DPDispatchAlg", "DispatchAlg", "DispatchConfig", "DistAttnConfig", "GreedyOverlapAlg",
    "GrpCollConfig", "LBDispatchAlg", "MinHeapDispatchAlg", "OverlapAlg", "OverlapConfig",
    "RandomSelectDispatchAlg", "SequentialDispatchAlg", "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg", "UniformOverlapAlg",
]  # fmt: skip


class AttnOverlapMode(Enum):
    """Who chooses the number of stages."""

    STATIC = "static"
    """``OverlapConfig.degree`` says it."""
    DYNAMIC = "dynamic"
    """The planner's cost model."""


@dataclass(frozen=True)
class DispatchAlg:
    """Names an algorithm of MagiAttention, without effect: our planner has its own."""

    def __post_init__(self) -> None:
        _convert(self, number, *vars(self))


@dataclass(frozen=True)
class LBDispatchAlg(DispatchAlg):
    """Lower bound."""


@dataclass(frozen=True)
class DPDispatchAlg(DispatchAlg):
    """Dynamic programming over subsets."""


@dataclass(frozen=True)
class BSDispatchAlg(DispatchAlg):
    """Binary search."""


@dataclass(frozen=True)
class BTPDispatchAlg(DispatchAlg):
    """Backtracking with pruning."""


@dataclass(frozen=True)
class MinHeapDispatchAlg(DispatchAlg):
    """Longest first to the least loaded rank; what our planner starts from."""


@dataclass(frozen=True)
class ToppHeapDispatchAlg(DispatchAlg):
    """Among the least loaded ranks, the one that shares most keys; our swap search's aim."""

    top_p: float = 0.0


@dataclass(frozen=True)
class BatchToppHeapDispatchAlg(DispatchAlg):
    """ToppHeap in batches."""

    top_p: float = 0.0


@dataclass(frozen=True)
class SequentialDispatchAlg(DispatchAlg):
    """One contiguous piece per rank."""


@dataclass(frozen=True)
class SortedSequentialSelectAlg(DispatchAlg):
    """Samples by area, each to ranks in turn."""

    allocation_ratio: float = 1.0


@dataclass(frozen=True)
class RandomSelectDispatchAlg(DispatchAlg):
    """Random."""


@dataclass(frozen=True)
class OverlapAlg:
    """Names how MagiAttention fills stages; ours are equal in rows."""


@dataclass(frozen=True)
class UniformOverlapAlg(OverlapAlg):
    """Equal stages."""

    random_costs: bool = False
    random_seed: int | None = None

    def __post_init__(self) -> None:
        _convert(self, flag, "random_costs")
        _convert(self, optional_integer, "random_seed")


@dataclass(frozen=True)
class GreedyOverlapAlg(OverlapAlg):
    """Refused by ``OverlapConfig``, as in MagiAttention."""


@dataclass(frozen=True)
class DispatchConfig:
    """How the sequence is cut.

    Raises:
        ValueError: chunk_size below 1.
        NotImplementedError: uneven_shard.
    """

    chunk_size: int | None = None
    """Tokens per chunk, taken as given (never silently capped). None: the planner chooses."""
    uneven_shard: bool = False
    """Only False: every rank holds equally many tokens, the end is padded inside."""
    alg: DispatchAlg = field(default_factory=MinHeapDispatchAlg)
    """Without effect; ``CostTable.swap_trials`` sets how long ours searches."""

    def __post_init__(self) -> None:
        _convert(self, optional_integer, "chunk_size")
        instance(self.alg, DispatchAlg, "DispatchConfig.alg", "pass MinHeapDispatchAlg()")
        _require(
            self.chunk_size is None or self.chunk_size >= 1,
            f"DispatchConfig.chunk_size must be >= 1 or None, got {self.chunk_size}; "
            f"leave it out for the planner's choice",
        )
        if flag(self.uneven_shard, "DispatchConfig.uneven_shard"):
            raise NotImplementedError(
                "every rank must hold equally many tokens, got DispatchConfig(uneven_shard=True); "
                "leave it out: any length works, the end is padded inside"
            )


@dataclass(frozen=True)
class OverlapConfig:
    """How many stages hide the communication; only mode and degree have an effect.

    The planner tries up to 4 stages, and its costs are rates of ``CostTable``.

    Raises:
        ValueError: values that do not fit together.
        NotImplementedError: GreedyOverlapAlg.
    """

    mode: AttnOverlapMode = AttnOverlapMode.STATIC
    degree: int | None = 1
    """Remote stages. 0: receive everything, then one kernel. None (with DYNAMIC): the planner."""
    dynamic_max_degree: int | None = 8
    min_chunk_size: int = 512
    max_num_chunks: int = 64
    """Only checked against degree."""
    alg: OverlapAlg = field(default_factory=UniformOverlapAlg)
    calc_cost_factor: float = 1.0
    comm_cost_factor: float = 1.0

    @property
    def no_overlap(self) -> bool:
        """Everything is received before one kernel call."""
        return self.degree == 0

    @property
    def enable(self) -> bool:
        """Two remote stages or more, or as many as the planner wants."""
        return self.degree is None or self.degree >= 2

    def __post_init__(self) -> None:
        self._check_kinds()
        if isinstance(self.alg, GreedyOverlapAlg):
            raise NotImplementedError(
                "OverlapConfig.alg must be a UniformOverlapAlg, got GreedyOverlapAlg, which no "
                "implementation has; leave it out"
            )
        if self.degree is not None and self.degree <= 1:
            object.__setattr__(self, "mode", AttnOverlapMode.STATIC)
        if self.degree == 0:
            object.__setattr__(self, "max_num_chunks", 1)
        is_static = self.mode is AttnOverlapMode.STATIC
        _require(
            is_static == (self.degree is not None),
            f"OverlapConfig needs a degree with mode STATIC and none with mode DYNAMIC, got "
            f"{self.mode} and degree {self.degree}; for the planner's choice pass "
            f"mode=AttnOverlapMode.DYNAMIC, degree=None",
        )
        _require(
            self.degree is None or 0 <= self.degree <= max(self.max_num_chunks, 1),
            f"OverlapConfig.degree must be between 0 and max_num_chunks {self.max_num_chunks}, "
            f"got {self.degree}; use 0 to 4",
        )
        for name in _POSITIVE:
            value = getattr(self, name)
            _require(
                value is None or value > 0,
                f"OverlapConfig.{name} must be > 0, got {value}; leave it out for its default",
            )

    def _check_kinds(self) -> None:
        instance(self.mode, AttnOverlapMode, "OverlapConfig.mode", "pass AttnOverlapMode.STATIC")
        instance(self.alg, OverlapAlg, "OverlapConfig.alg", "pass UniformOverlapAlg()")
        _convert(self, optional_integer, "degree", "dynamic_max_degree")
        _convert(self, integer, "min_chunk_size", "max_num_chunks")
        _convert(self, number, "calc_cost_factor", "comm_cost_factor")


_POSITIVE = (
    "dynamic_max_degree", "min_chunk_size", "max_num_chunks", "calc_cost_factor", "comm_cost_factor"
)  # fmt: skip


@dataclass(frozen=True)
class GrpCollConfig:
    """Buffers and SMs of MagiAttention's own collectives; without effect here."""

    num_sms: int = 24
    nvl_chunk_size: int = 8
    nvl_buffer_size: int = 256
    rdma_chunk_size: int = 16
    rdma_buffer_size: int = 128
    num_nvl_bytes: int = int(2e9)
    num_rdma_bytes: int = 0

    def __post_init__(self) -> None:
        _convert(self, partial(integer, low=0), *vars(self))


@dataclass(frozen=True)
class DistAttnConfig:
    """Everything a key is made with beside the mask, heads and group; hashable."""

    dispatch_config: DispatchConfig = field(default_factory=DispatchConfig)
    overlap_config: OverlapConfig = field(default_factory=OverlapConfig)
    grpcoll_config: GrpCollConfig = field(default_factory=GrpCollConfig)
    magi_config: MagiConfig = field(default_factory=MagiConfig)
    """Ours alone: kernel_backend, forward_mode, deterministic, max_imbalance, cost table. Its
    chunk_size and overlap_degree are replaced by the two configs above."""

    def __post_init__(self) -> None:
        for part in fields(self):
            kind: Any = part.default_factory
            instance(getattr(self, part.name), kind, part.name, f"pass {kind.__name__}()")

    def engine_config(self) -> MagiConfig:
        """What the planner gets."""
        return replace(
            self.magi_config,
            chunk_size=self.dispatch_config.chunk_size,
            overlap_degree=self.overlap_config.degree,
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _convert(config: object, check: Callable[[Any, str], Any], *names: str) -> None:
    """Put fields in the plain form that a check gives them."""
    for name in names:
        checked = check(getattr(config, name), f"{type(config).__name__}.{name}")
        object.__setattr__(config, name, checked)
