"""Several ranks on one GPU, over NCCL: for results, never for times."""

from __future__ import annotations

import os

OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Lets ranks on one GPU share symmetric memory."""


def environment(rank: int) -> dict[str, str]:
    """Variables of a rank that shares the first GPU, to be set before it starts NCCL.

    NCCL refuses two ranks of one host on one GPU. So each rank calls itself a host, and what NCCL
    moves goes through sockets.
    """
    return {
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        OVERLAP: "1",
    }


def is_shared() -> bool:
    """Whether this process was started as such a rank."""
    return OVERLAP in os.environ


def allow_peer_reads() -> None:
    """Let this process read the memory of others on its GPU, which transports refuse otherwise."""
    from megatron_magi.core.comm import transport_choice

    transport_choice._why_not = lambda group, like: ""
