"""The place that torchrun gave this process: the only reader of a launcher's variables."""

from __future__ import annotations

import os

from megatron_magi.training.process.processes import Place


def launched_place() -> Place | None:
    """Rank and world by torchrun's variables, as srun may set them too; None when alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return Place(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )
