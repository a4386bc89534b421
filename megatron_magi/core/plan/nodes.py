"""How a group's ranks lie on nodes: rank r is rank r % n of node r // n, with n ranks per node."""

from __future__ import annotations

from megatron_magi.config import MagiConfig


def ranks_per_node(config: MagiConfig, cp_size: int) -> int:
    """The context-parallel ranks of one node, or 0 if exchanges need not tell links apart: the cost
    table names no nodes, one node holds all ranks, or every rank has a node of its own.

    Raises:
        ValueError: nodes with different numbers of ranks.
    """
    per_node = config.costs.ranks_per_node
    if per_node is None or per_node == 1 or per_node >= cp_size:
        return 0
    if cp_size % per_node:
        raise ValueError(
            f"CostTable.ranks_per_node must divide the {cp_size} ranks of the context-parallel "
            f"group, got {per_node}; pass how many of its ranks share a node, or None"
        )
    return per_node
