"""`pretrain_named.py`, whose ranks share one GPU: `agree --one-gpu` of pretrain.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from benchmarks.lib.one_gpu import allow_sharing
from benchmarks.train import pretrain_named


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
    allow_sharing()
    start = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        start(*args, **kwargs)

    dist.init_process_group = init_process_group
    dist._coalescing_manager = _one_by_one


if __name__ == "__main__":
    share_a_gpu()
    pretrain_named.main()
