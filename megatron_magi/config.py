"""Every knob of the engine in one frozen value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatron_magi.checks import INT32_MAX, flag, integer, number_or_infinite, shown

KernelBackend = Literal["auto", "cuda", "fa4", "flex", "reference"]
ForwardMode = Literal["at_once", "local_first", "staged"]
TransportChoice = Literal["auto", "all_to_all", "symm_mem"]
MOST_SECONDS = 10**9
"""The longest wait, 31 years: torch.distributed counts nanoseconds in 64 bits."""


def _convert(config: Any, field: str, kind: Callable[[Any, str], Any], what: str) -> None:
    value = getattr(config, field)
    if value is None and getattr(type(config), field) is None:
        return
    try:
        object.__setattr__(config, field, kind(value, field))
    except TypeError:
        raise TypeError(
            f"{type(config).__name__}.{field} must be {what}, got {shown(value)}; "
            f"leave it out to use the default"
        ) from None


def _require(holds: bool, field: str, rule: str, config: Any) -> None:
    if not holds:
        raise ValueError(
            f"{type(config).__name__}.{field} must be {rule}, got {shown(getattr(config, field))}; "
            f"leave it out to use the default"
        )


def _check_count(config: Any, field: str, least: int) -> None:
    """A number from ``least`` to what an int32 holds, or None."""
    value = getattr(config, field)
    _require(value is None or value >= least, field, f">= {least} or None", config)
    _require((value or 0) <= INT32_MAX, field, f"<= {INT32_MAX}", config)


@dataclass(frozen=True)
class CostTable:
    """Units of work of the planner, the rates by which it chooses chunks and stages, and how
    long it may search.

    Raises:
        TypeError: a field that is no number.
        ValueError: a field out of its range.
    """

    link_gib_s: float = 250.0
    """Bytes a rank receives per second, in GiB/s (all-to-all on NVLink, 4 x H200: 246-255)."""

    kernel_tflops: float = 550.0
    """Rate of the attention kernel in TFLOP/s."""

    memory_gib_s: float = 3700.0
    """Bytes a kernel reads and writes per second, in GiB/s (H200: 3700 to 4000)."""

    stage_latency_us: float = 60.0
    """Fixed cost of an exchange, or of one more stage in backward, in microseconds: launches, one
    message per peer. One more kernel call in forward costs a quarter of it."""

    tile_q: int = 128
    """Query rows of a kernel tile; loads are counted in tiles because the kernel computes tiles."""

    tile_k: int = 128
    """Key rows of a kernel tile."""

    ranks_per_node: int | None = None
    """Context-parallel ranks that share a node, neighbours in the group. A row then crosses to each
    node once. None: all ranks on one node, or on a network that is as fast between nodes."""

    node_link_gib_s: float = 45.0
    """Bytes a rank receives from other nodes per second, in GiB/s (400 Gbit/s are 46.6)."""

    swap_trials: int | None = None
    """Trials of the search that swaps chunks to cut traffic. None means a number that grows with
    the chunks. 0 means no search."""

    def __post_init__(self) -> None:
        for name in ("tile_q", "tile_k"):
            _convert(self, name, integer, "an integer")
            _require(1 <= getattr(self, name) <= INT32_MAX, name, f"1 to {INT32_MAX}", self)
        _convert(self, "ranks_per_node", integer, "an integer or None")
        _convert(self, "swap_trials", integer, "an integer or None")
        _check_count(self, "swap_trials", 0)
        nodes = self.ranks_per_node
        _require(nodes is None or nodes >= 1, "ranks_per_node", ">= 1 or None", self)
        rates = ("link_gib_s", "kernel_tflops", "memory_gib_s", "node_link_gib_s")
        for name in (*rates, "stage_latency_us"):
            _convert(self, name, number_or_infinite, "a number")
        for name in rates:
            _require(0 < getattr(self, name) < math.inf, name, "> 0 and finite", self)
        _require(0 <= self.stage_latency_us < math.inf, "stage_latency_us", ">= 0 and finite", self)


H200_NVLINK = CostTable()
"""H200 GPUs of one host."""


@dataclass(frozen=True)
class MagiConfig:
    """Settings that change results or speed; part of every plan's digest, equal on every rank.

    Raises:
        TypeError: a field that is no number, or not True or False, where one is required.
        ValueError: a field out of its range.
    """

    chunk_size: int | None = None
    """Tokens per chunk, the smallest piece moved between ranks. None: the planner's cost model."""

    max_imbalance: float | None = None
    """Highest load of a rank over the mean, in kernel tiles, as far as chunks allow. None: 1.01; in
    a group of several nodes (`costs.ranks_per_node`), the predicted fastest of 1.01, 1.02 and
    1.05."""

    overlap_degree: int | None = None
    """Remote stages of the backward, and of a staged forward. 0: receive everything, then one
    kernel. None: the planner's cost model."""

    forward_mode: ForwardMode | None = None
    """"at_once": receive everything, then one kernel. "local_first": rows that see only own keys
    while other keys arrive, then the other rows. "staged": own keys, then the remote stages,
    merged. None: the planner's cost model."""

    costs: CostTable = H200_NVLINK
    """Rates and tile sizes that plans are chosen by."""

    kernel_backend: KernelBackend = "auto"
    """Backend of attention. "auto", which is logged: "cuda" on Hopper, "fa4" on Blackwell if
    flash-attn-4 is installed, "flex" on other GPUs and for wider heads, "reference" on the CPU and
    for fp32 and fp64."""

    deterministic: bool = False
    """Bit-identical gradients from run to run. The reference backend always is."""

    dkv_reduce_in_fp32: bool = True
    """Partial gradients of keys and values travel to their owners in fp32. False: in the inputs'
    dtype, with half the bytes for bf16 and one more rounding per reading rank. Sums are fp32."""

    keep_received_keys: bool = False
    """The forward keeps received keys and values for the backward: less traffic, more memory.
    False: they are sent again."""

    send_queries: bool | None = None
    """True if queries may be sent to the rank that has the keys, and their outputs back, between
    two ranks where that takes fewer bytes than keys and gradients do. None: in cross-attention
    alone. In causal attention with few key heads it saves nothing."""

    transport: TransportChoice = "auto"
    """How attention moves rows between ranks. "all_to_all": torch.distributed's, with any backend.
    "symm_mem": Hopper GPUs of one host copy from each other's symmetric memory without an SM.
    "auto", which is logged: "symm_mem" where that is possible, and "all_to_all" elsewhere."""

    agreement_timeout_s: float = 300.0
    """Seconds to wait for a late rank, e.g. one that writes a checkpoint. Disagreement raises at
    once."""

    def __post_init__(self) -> None:
        # Equal configs must have equal digests on every rank: 1 becomes 1.0, numpy's 128 Python's.
        for name in ("chunk_size", "overlap_degree"):
            _convert(self, name, integer, "an integer")
        _convert(self, "max_imbalance", number_or_infinite, "a number or None")
        _convert(self, "agreement_timeout_s", number_or_infinite, "a number")
        for name, values in _CHOICES.items():
            value = getattr(self, name)
            _require(value is None or isinstance(value, str), name, "a word", self)
            if value is not None:
                object.__setattr__(self, name, str(value))  # numpy's has another repr
            words = tuple(word for word in values if word is not None)
            rule = f"one of {words}" + (" or None" if None in values else "")
            _require(value in values, name, rule, self)
        for name in ("deterministic", "dkv_reduce_in_fp32", "keep_received_keys"):
            _convert(self, name, flag, "True or False")
        if self.send_queries is not None:
            _convert(self, "send_queries", flag, "True or False, or None")
        _require(isinstance(self.costs, CostTable), "costs", "a CostTable", self)
        _check_count(self, "chunk_size", 1)
        degree = self.overlap_degree
        _require(
            degree is None or 0 <= degree <= 64, "overlap_degree", "between 0 and 64, or None", self
        )
        cap = self.max_imbalance
        _require(cap is None or cap >= 1.0, "max_imbalance", ">= 1.0 or None", self)
        name = "agreement_timeout_s"
        rule = f"> 0, finite and at most {MOST_SECONDS}"
        _require(0 < self.agreement_timeout_s <= MOST_SECONDS, name, rule, self)


_CHOICES = {
    "forward_mode": (*get_args(ForwardMode), None),
    "kernel_backend": get_args(KernelBackend),
    "transport": get_args(TransportChoice),
}
