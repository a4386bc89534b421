"""Recomputation and random states, and the exchanges of tensor and sequence parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class CudaRNGStatesTracker:
    """Named states of the CUDA generator."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}

    def get_states(self) -> dict[str, Tensor]:
        """The states by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Take over states."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state from a seed; the generator's own stays as it was."""
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from a named state."""
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(before)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """Recompute `function` in the backward pass."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


@contextlib.contextmanager
def activation_recompute_forward(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Marks a recomputation for quantized layers, of which there are none."""
    yield


def gather_rows(x: Tensor, group: Any) -> Tensor:
    """The rows of all ranks of the group behind one another."""
    out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def sum_and_keep_rows(x: Tensor, group: Any) -> Tensor:
    """The sum over the group's ranks; each keeps its share of the rows."""
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def sum_over(x: Tensor, group: Any) -> Tensor:
    """The sum over the group's ranks."""
    out = x.clone()
    dist.all_reduce(out, group=group)
    return out


def same(x: Tensor, group: Any) -> Tensor:
    """The tensor itself."""
    return x.view_as(x)


class Exchange(torch.autograd.Function):
    """One exchange in the forward pass, its transpose in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, there: Any, back: Any) -> Tensor:
        """`there(x, group)`."""
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """`back(grad, group)`."""
        return ctx.back(grad, ctx.group), None, None, None


def enter_parallel(x: Tensor, group: Any, sequence_parallel: bool) -> Tensor:
    """Before a weight that is split by its outputs."""
    ways = (gather_rows, sum_and_keep_rows) if sequence_parallel else (same, sum_over)
    return Exchange.apply(x, group, *ways)


def leave_parallel(x: Tensor, group: Any, sequence_parallel: bool) -> Tensor:
    """Behind a weight that is split by its inputs."""
    ways = (sum_and_keep_rows, gather_rows) if sequence_parallel else (sum_over, same)
    return Exchange.apply(x, group, *ways)
