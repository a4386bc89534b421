"""How the processes of a benchmark of several ranks begin."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from benchmarks.lib import shared_gpu


def join(
    rank: int, num_ranks: int, kind: str, store: str, *, one_gpu: bool = False
) -> torch.device:
    """Make this process one of the ranks; returns its device, the current one on a GPU.

    Args:
        kind: "cuda", with NCCL and a GPU of its own for every rank, or "cpu", with gloo.
        store: a file that all ranks see and that does not exist yet.
        one_gpu: all ranks share the first GPU.
    """
    device = torch.device(kind, 0 if one_gpu else rank) if kind == "cuda" else torch.device("cpu")
    if one_gpu:
        os.environ.update(shared_gpu.environment(rank))
        shared_gpu.allow_peer_reads()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    return device
