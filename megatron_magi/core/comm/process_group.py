"""The values that may name the context-parallel group."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

_num_opened: Counter[str] = Counter()
"""How many stores of a name this process has asked for; see ``rendezvous_store``."""

CpGroup: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"
"""A process group, a mesh, or None for one rank without torch.distributed. A 2-D mesh is [nodes,
ranks of a node]: a row crosses to another node once (CostTable.ranks_per_node)."""


def resolve_group(cp_group: CpGroup) -> dist.ProcessGroup | None:
    """The process group behind ``cp_group``.

    Raises:
        ValueError: a mesh of more than two dimensions, or of two without names or whose ranks do
            not ascend.
        TypeError: a value of any other type.

    Cost: the first call with a 2-D mesh creates a group of all its ranks, a collective call.
    """
    if cp_group is None or isinstance(cp_group, dist.ProcessGroup):
        return cp_group
    if not isinstance(cp_group, DeviceMesh):
        raise TypeError(
            f"cp_group must be a ProcessGroup, a 1-D or 2-D DeviceMesh or None, got "
            f"{type(cp_group).__name__}; pass the context-parallel group"
        )
    if cp_group.ndim > 2:
        raise ValueError(
            f"a cp_group mesh must have one dimension, or two, nodes and the ranks of a node, got "
            f"{cp_group.ndim}; pass mesh['cp']"
        )
    if cp_group.ndim == 2 and cp_group.mesh_dim_names is None:
        raise ValueError(
            "the dimensions of a cp_group mesh must have names, got none; pass mesh_dim_names to "
            "init_device_mesh"
        )
    return cp_group.get_group() if cp_group.ndim == 1 else _flattened(cp_group)


def _flattened(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a 2-D mesh; a node must be neighbours in it."""
    group = mesh._flatten().get_group()
    ranks, given = dist.get_process_group_ranks(group), mesh.mesh.flatten().tolist()
    if ranks != given:
        raise ValueError(
            f"the ranks of a cp_group mesh of two dimensions must be in the order of its group, "
            f"{ranks}, node after node, got {given}; give every node neighbouring ranks, or pass "
            f"a ProcessGroup"
        )
    return group


def mesh_ranks_per_node(cp_group: CpGroup) -> int | None:
    """Ranks of a node if ``cp_group`` is a 2-D mesh; otherwise it does not tell."""
    if isinstance(cp_group, DeviceMesh) and cp_group.ndim == 2:
        return cp_group.size(1)
    return None


def is_alive(group: dist.ProcessGroup) -> bool:
    """True if ``destroy_process_group`` has not ended the group yet."""
    if not dist.is_initialized():
        return False
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def rendezvous_store(parent: dist.ProcessGroup, purpose: str) -> PrefixStore:
    """The store by which the ranks of ``parent`` make another group of the same ranks.

    ``dist.new_group`` needs every rank of the job, and its local variant names a group by how many
    groups the process is in, which differs between pipeline stages. This store is a part of the
    job's, under the parent's name and ranks and the number of earlier calls for this purpose, so
    that only the ranks of one group have to ask for it equally often.
    """
    ranks = "-".join(map(str, dist.get_process_group_ranks(parent)))
    name = f"megatron_magi/{purpose}/{parent.group_name}/{ranks}"
    _num_opened[name] += 1
    return PrefixStore(f"{name}/{_num_opened[name]}", _get_default_store())


def forget_stores() -> None:
    """Count from the first call again, with the store of another job in this process: after a fault
    ranks may have asked unequally often."""
    _num_opened.clear()


def group_size(cp_group: CpGroup) -> int:
    group = resolve_group(cp_group)
    return 1 if group is None else group.size()


def group_rank(cp_group: CpGroup) -> int:
    group = resolve_group(cp_group)
    return 0 if group is None else group.rank()
