"""The values that may name the context-parallel group."""

from __future__ import annotations

from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

CpGroup: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"
"""A process group, a 1-D mesh, or None for one rank without torch.distributed."""


def resolve_group(cp_group: CpGroup) -> dist.ProcessGroup | None:
    """The process group behind ``cp_group``.

    Raises:
        ValueError: a mesh that is not 1-D.
        TypeError: a value of any other type.
    """
    if cp_group is None or isinstance(cp_group, dist.ProcessGroup):
        return cp_group
    if not isinstance(cp_group, DeviceMesh):
        raise TypeError(
            f"cp_group must be a ProcessGroup, a 1-D DeviceMesh or None, got "
            f"{type(cp_group).__name__}; pass the context-parallel group"
        )
    if cp_group.ndim != 1:
        raise ValueError(
            f"a cp_group mesh must have one dimension, got {cp_group.ndim}; pass mesh['cp']"
        )
    return cp_group.get_group()


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether ``destroy_process_group`` has not ended the group yet."""
    if not dist.is_initialized():
        return False
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def group_size(cp_group: CpGroup) -> int:
    group = resolve_group(cp_group)
    return 1 if group is None else group.size()


def group_rank(cp_group: CpGroup) -> int:
    group = resolve_group(cp_group)
    return 0 if group is None else group.rank()
