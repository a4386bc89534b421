"""PyTorch's FSDP2 divides gradients by the tokens of all ranks, as Megatron's own wrapper does.

Under per-token loss Megatron asks each wrapper to scale its gradients by one over the counted
tokens. Its wrapper of FSDP2 does nothing then, and FSDP2 has already averaged over the group.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_magi.launcher.session import hook


@hook
def replace_scale_gradients(
    launch: Any, original: Any, self: Any, scaling_factor: Any, *args: Any, **kwargs: Any
) -> None:
    """For `TorchFullyShardedDataParallel.scale_gradients`, which it inherits and which is empty."""
    factor = scaling_factor * dist.get_world_size(self.process_group)  # FSDP2 took the mean
    for parameter in self.module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
