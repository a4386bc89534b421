"""The MoE router's auxiliary losses under per-token loss and context parallelism.

Per-token loss divides every gradient by the tokens of all ranks, so a loss that is a mean over all
ranks has to be scaled by the tokens of all ranks first. Megatron 0.18 scales it by a rank's
own, so the effective coefficient is the configured one divided by the size of the group that shares
the tokens. 0.19 scales it correctly.
"""

from __future__ import annotations

from typing import Any

from megatron_magi.launcher.session import hook


@hook
def wrap_attach_aux_loss(
    launch: Any, original: Any, self: Any, activation: Any, *args: Any, **kwargs: Any
) -> Any:
    """For `TopKRouter.attach_and_log_load_balancing_loss` before 0.19."""
    own = kwargs.pop("valid_token_count", None)
    count = activation.shape[0] if own is None else own
    shared = count * self.tp_cp_group.size()
    return original(self, activation, *args, valid_token_count=shared, **kwargs)


@hook
def wrap_z_loss(launch: Any, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """For `TopKRouter.apply_z_loss` before 0.19, which divides its coefficient by the group too."""
    coefficient = self.config.moe_z_loss_coeff
    if coefficient is None:
        return original(self, *args, **kwargs)
    self.config.moe_z_loss_coeff = coefficient * self.tp_cp_group.size()
    try:
        return original(self, *args, **kwargs)
    finally:
        self.config.moe_z_loss_coeff = coefficient
