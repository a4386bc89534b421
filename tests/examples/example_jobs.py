"""Examples in forked worlds: each rank is prepared as torchrun would prepare its process."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

import megatron_magi.adapter.plugin
import megatron_magi.core.kernel.reference  # noqa: F401


def run_example(script: str, flags: list[str], port: int) -> str:
    """What the script prints on this rank; one process alone has no variables of torchrun."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ.pop("LOCAL_RANK", None)
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()
