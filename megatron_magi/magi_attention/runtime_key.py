"""DistAttnRuntimeKey: the value that users carry from dispatch to attention."""

from __future__ import annotations

import atexit
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_magi.checks import instance
from megatron_magi.core.comm.process_group import CpGroup, group_rank, is_alive, resolve_group
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.plan.attn_plan import check_plan
from megatron_magi.core.runtime.plan_cache import cached_plan
from megatron_magi.magi_attention.dist_attn_config import DistAttnConfig
from megatron_magi.magi_attention.mask_type import AttnMaskType, typed_slices
from megatron_magi.magi_attention.ranges import AttnRanges


@dataclass(frozen=True)
class DistAttnRuntimeKey:
    """A plan, the group that carries it out, and the config it was made with.

    Frozen and hashable; equal keys mean equal work. Nothing is looked up behind it, so it stays
    valid after ``clear_cache``.
    """

    plan: AttnPlan
    cp_group: dist.ProcessGroup | None
    """None: one rank without torch.distributed."""
    dist_attn_config: DistAttnConfig

    def __post_init__(self) -> None:
        check_plan(self.plan)
        resolve_group(self.cp_group)
        check_config(self.dist_attn_config)

    @property
    def total_seqlen_q(self) -> int:
        """Tokens of the sequence, without padding."""
        return self.plan.layout.total_seqlen

    @property
    def total_seqlen_k(self) -> int:
        """Keys of the sequence, without padding."""
        return self.plan.key_layout.total_seqlen

    @property
    def pad_size(self) -> int:
        """Rows of padding on all ranks together; added and dropped inside."""
        return self.plan.layout.padded_seqlen - self.plan.layout.total_seqlen

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk, as planned."""
        return self.plan.layout.chunk_size

    @property
    def num_heads_q(self) -> int:
        return self.plan.head_shape.num_heads_q

    @property
    def num_heads_kv(self) -> int:
        return self.plan.head_shape.num_heads_kv

    @property
    def head_dim(self) -> int:
        return self.plan.head_shape.head_dim

    @property
    def q_ranges(self) -> AttnRanges:
        """The mask's query ranges, made canonical."""
        return typed_slices(self.plan.mask.slices)[0]

    @property
    def k_ranges(self) -> AttnRanges:
        """The mask's key ranges, row by row with ``q_ranges``."""
        return typed_slices(self.plan.mask.slices)[1]

    @property
    def attn_mask_type(self) -> tuple[AttnMaskType, ...]:
        """The mask's types, row by row with ``q_ranges``."""
        return tuple(typed_slices(self.plan.mask.slices)[2])

    @property
    def cp_rank(self) -> int:
        """This process's rank in the group."""
        return group_rank(self.cp_group)


def check_key(value: object, name: str = "key") -> None:
    """Refuse what is no DistAttnRuntimeKey."""
    remedy = "make one with magi_attn_varlen_key or magi_attn_flex_key"
    instance(value, DistAttnRuntimeKey, name, remedy)


def check_config(value: object) -> None:
    """Refuse what is no DistAttnConfig."""
    instance(value, DistAttnConfig, "dist_attn_config", "pass DistAttnConfig()")


_most_recent: dict[dist.ProcessGroup | None, DistAttnRuntimeKey] = {}


def remember(key: DistAttnRuntimeKey) -> DistAttnRuntimeKey:
    """Note the key as its group's most recent one, and hand it back."""
    check_key(key)
    _forget_destroyed()
    _most_recent[key.cp_group] = key
    return key


def get_most_recent_key(cp_group: CpGroup) -> DistAttnRuntimeKey:
    """The key that was made or used last with this group.

    For code that a key cannot be passed to; where it can, pass it.

    Raises:
        ValueError: no key was made with this group.
    """
    group = flat_group(cp_group)
    _forget_destroyed()
    if group not in _most_recent:
        raise ValueError(
            "get_most_recent_key needs a key made with this cp_group, got a group without one; "
            "call magi_attn_varlen_key or magi_attn_flex_key with it first"
        )
    return _most_recent[group]


def _forget_destroyed() -> None:
    """A key holds its group, whose threads must end when the group is destroyed."""
    for group in [g for g in _most_recent if g is not None and not is_alive(g)]:
        del _most_recent[group]


atexit.register(_most_recent.clear)


def clear_cache(cp_group: CpGroup = None) -> None:
    """Forget most recent keys and cached plans; keys in the caller's hands stay valid.

    Args:
        cp_group: None: everything. A group: only its most recent key, because plans are values
            that groups share.
    """
    if cp_group is not None:
        _most_recent.pop(flat_group(cp_group), None)
        return
    _most_recent.clear()
    cached_plan.cache_clear()


def flat_group(cp_group_or_mesh: CpGroup) -> dist.ProcessGroup | None:
    """The process group of all ranks of a group or mesh.

    A mesh of several dimensions is flattened, which is a collective call the first time. Two name
    the nodes.
    """
    if isinstance(cp_group_or_mesh, DeviceMesh) and cp_group_or_mesh.ndim > 2:
        return cp_group_or_mesh._flatten().get_group()
    return resolve_group(cp_group_or_mesh)
