"""How a run is spread over processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelConfig:
    """How processes are laid out; the world is tp * pp * cp * dp processes."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    vpp: int | None = None
    """Model chunks per pipeline rank (interleaved schedule). None: no interleaving."""
    cp: int = 1
    """Context parallel size."""
    ep: int = 1
    """Expert parallel size. Only 1 today: the models here have no experts."""
    dp: int | None = None
    """Data parallel size. None: what is left of the world (1 where pretrain.py launches itself)."""
    sequence_parallel: bool = False
    """Split norms and dropouts over tp along the sequence."""
    distributed_optimizer: bool = False
    """Shard optimizer state over dp * cp."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still computes others."""
    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass begins. Needs distributed_optimizer and
    overlap_grad_reduce."""

    @property
    def model_size(self) -> int:
        """Processes of one data-parallel replica."""
        return self.tp * self.pp * self.cp

    @property
    def num_processes(self) -> int:
        """Processes of a run that no launcher started: one replica where dp is not given."""
        return self.model_size * (self.dp or 1)
