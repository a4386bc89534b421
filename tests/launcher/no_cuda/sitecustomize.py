"""Lets Megatron's process for asynchronous saves start on a machine without CUDA.

It is a new interpreter that imports the pretrain script and chooses a GPU, and nothing of ours runs
in it. Python imports this file at its start, where this folder is on its path.
"""

from __future__ import annotations

import os

if os.environ.get("LAUNCHER_TEST_WITHOUT_CUDA"):
    import torch

    from megatron_magi.adapter import compat

    def nothing(*args: object, **kwargs: object) -> None:
        """In place of what chooses a device."""

    def wait(*args: object, **kwargs: object) -> None:
        """In place of what waits for a device."""

    def one() -> int:
        """In place of the number of devices."""
        return 1

    compat.require_megatron()
    for name, stand_in in (("set_device", nothing), ("device_count", one), ("synchronize", wait)):
        setattr(torch.cuda, name, stand_in)
