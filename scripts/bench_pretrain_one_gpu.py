"""`bench_pretrain_named`, whose ranks share one GPU: for losses where there is no second GPU.

NCCL takes one rank a GPU, so gloo carries everything but the rows of attention, which ranks read
from each other's memory as on GPUs of their own. Times mean nothing here. Used by `agree
--one-gpu` of bench_pretrain.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bench_pretrain_named
import torch.distributed as dist


class _Ended:
    """What `_coalescing_manager` yields; every collective of gloo waits by itself."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


@contextmanager
def _one_by_one(*_: Any, **__: Any) -> Iterator[_Ended]:
    """gloo joins collectives of CPU tensors only."""
    yield _Ended()


def share_a_gpu() -> None:
    """Make this rank one of several on GPU 0."""
    os.environ["LOCAL_RANK"] = "0"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    start = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        start(*args, **kwargs)

    dist.init_process_group = init_process_group
    dist._coalescing_manager = _one_by_one
    from megatron_magi.core.comm import transport_choice

    transport_choice._why_not = lambda group, like: ""


if __name__ == "__main__":
    share_a_gpu()
    bench_pretrain_named.main()
