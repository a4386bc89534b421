"""The norm behind a Mamba layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """RMSNorm over groups of channels, behind the gate if there is one."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, **more: Any
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size or hidden_size
        place = {name: more[name] for name in ("device", "dtype") if name in more}
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **place))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """[..., hidden_size] -> the same."""
        x = x if z is None else x * torch.nn.functional.silu(z)
        groups = x.unflatten(-1, (-1, self.group_size))
        normed = torch.nn.functional.rms_norm(groups, (self.group_size,), eps=self.eps)
        return normed.flatten(-2) * self.weight
