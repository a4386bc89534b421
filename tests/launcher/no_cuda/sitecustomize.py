"""Lets Megatron's process for asynchronous saves start on a machine without CUDA.

It is a new interpreter that imports the pretrain script and chooses a GPU, and nothing of ours runs
in it. Python imports this file at its start, where this folder is on its path.

Before training goes on, that process copies what it will write from the device to the host. Of a
tensor on the host Megatron makes no copy, so it would write what later steps have made of it.
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

    moved = torch.Tensor.to

    def copied(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """``Tensor.to`` that copies also from the host to the host, as saves call it."""
        made = moved(self, *args, **kwargs)
        is_save = args == ("cpu",) and "non_blocking" in kwargs
        return made.clone() if is_save and made is self else made

    torch.Tensor.to = copied
    compat.require_megatron()
    for name, stand_in in (("set_device", nothing), ("device_count", one), ("synchronize", wait)):
        setattr(torch.cuda, name, stand_in)
