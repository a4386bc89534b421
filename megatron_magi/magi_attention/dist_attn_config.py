"""MagiAttention's configuration classes.

Two settings change a plan: `DispatchConfig.chunk_size` and `OverlapConfig.degree`. The others tune
MagiAttention's own algorithms: programs may pass them, and they have no effect. Settings of this
package's engine are in `DistAttnConfig.magi_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from megatron_magi.checks import flag, instance, optional_integer
from megatron_magi.config import MagiConfig
from megatron_magi.magi_attention.renamed import asks_for_queries

__all__ = [
    "AttnOverlapMode", "BSDispatchAlg", "BTPDispatchAlg", "BatchToppHeapDispatchAlg",
    "DPDispatchAlg", "DispatchAlg", "DispatchConfig", "DistAttnConfig", "GreedyOverlapAlg",
    "GrpCollConfig", "LBDispatchAlg", "MinHeapDispatchAlg", "OverlapAlg", "OverlapConfig",
    "RandomSelectDispatchAlg", "SequentialDispatchAlg", "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg", "UniformOverlapAlg",
]  # fmt: skip


class AttnOverlapMode(Enum):
    """Who chooses the number of stages; without effect, as `OverlapConfig.degree` says it."""

    STATIC = "static"
    DYNAMIC = "dynamic"


class Unused:
    """An algorithm or buffer of MagiAttention that this package does not have.

    Takes any arguments; named ones become attributes. All are equal, as none has an effect.
    """

    def __init__(self, *values: Any, **named: Any) -> None:
        vars(self).update(named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unused)

    def __hash__(self) -> int:
        return hash(Unused)

    def __repr__(self) -> str:
        return f"Unused({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


DispatchAlg = LBDispatchAlg = DPDispatchAlg = BSDispatchAlg = BTPDispatchAlg = Unused
MinHeapDispatchAlg = ToppHeapDispatchAlg = BatchToppHeapDispatchAlg = Unused
SequentialDispatchAlg = SortedSequentialSelectAlg = RandomSelectDispatchAlg = Unused
OverlapAlg = UniformOverlapAlg = GreedyOverlapAlg = GrpCollConfig = Unused


@dataclass(frozen=True)
class DispatchConfig:
    """How the sequence is cut.

    Raises:
        ValueError: chunk_size below 1.
        NotImplementedError: uneven_shard.
    """

    chunk_size: int | None = None
    """Tokens per chunk, taken as given and never capped. None: the planner chooses."""
    uneven_shard: bool = False
    """Only False: every rank holds equally many tokens, the end is padded inside."""
    alg: Any = field(default_factory=Unused)
    """Without effect; ``CostTable.swap_trials`` sets how long the planner searches."""

    def __post_init__(self) -> None:
        chunk_size = optional_integer(self.chunk_size, "DispatchConfig.chunk_size", 1)
        object.__setattr__(self, "chunk_size", chunk_size)
        if flag(self.uneven_shard, "DispatchConfig.uneven_shard"):
            raise NotImplementedError(
                "every rank must hold equally many tokens, got DispatchConfig(uneven_shard=True); "
                "leave it out: any length works, the end is padded inside"
            )


@dataclass(frozen=True)
class OverlapConfig:
    """How many stages hide the communication; only ``degree`` has an effect.

    Raises:
        ValueError: a degree outside of 0 to 64.
    """

    mode: Any = AttnOverlapMode.STATIC
    degree: int | None = 1
    """Remote stages. 0: receive everything, then one kernel. None: the planner tries up to 4."""
    dynamic_max_degree: Any = 8
    min_chunk_size: Any = 512
    max_num_chunks: Any = 64
    alg: Any = field(default_factory=Unused)
    calc_cost_factor: Any = 1.0
    comm_cost_factor: Any = 1.0

    def __post_init__(self) -> None:
        degree = optional_integer(self.degree, "OverlapConfig.degree", 0, 64)
        object.__setattr__(self, "degree", degree)


@dataclass(frozen=True)
class DistAttnConfig:
    """Everything a key is made with besides the mask, heads and group; hashable."""

    dispatch_config: DispatchConfig = field(default_factory=DispatchConfig)
    overlap_config: OverlapConfig = field(default_factory=OverlapConfig)
    grpcoll_config: Unused = field(default_factory=Unused)
    magi_config: MagiConfig = field(default_factory=MagiConfig)
    """Settings of this package: kernel_backend, forward_mode, deterministic, max_imbalance, cost
    table. Its chunk_size and overlap_degree are replaced by the two configs above."""

    def __post_init__(self) -> None:
        for part in fields(self):
            kind: Any = part.default_factory
            if kind is not Unused:
                instance(getattr(self, part.name), kind, part.name, f"pass {kind.__name__}()")

    def engine_config(self) -> MagiConfig:
        """The planner's config. MAGI_ATTENTION_QO_COMM=1 lets it send queries, unless
        ``MagiConfig.send_queries`` says otherwise."""
        sends = self.magi_config.send_queries
        if sends is None and asks_for_queries():
            sends = True
        return replace(
            self.magi_config,
            send_queries=sends,
            chunk_size=self.dispatch_config.chunk_size,
            overlap_degree=self.overlap_config.degree,
        )
