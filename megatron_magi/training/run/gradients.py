"""Writes whole gradients: reduced, divided by tokens and not clipped, equal in every layout.

A layout cuts a gradient in three ways: the distributed optimizer leaves each data-parallel rank a
reduced part of every bucket, tensor parallelism cuts a parameter along one dimension, and pipeline
stages hold different layers. Here the parts of a bucket are gathered in place, and then one rank
of each stage collects a parameter at a time and writes it, so that no rank holds a second model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_magi.adapter.init import named_global_parameters, num_stacked, sliced_dim
from megatron_magi.adapter.model_chunks import model_chunks
from megatron_magi.compare.gradient_folder import (
    finish,
    forget_gradients,
    gradient_path,
    write_gradient,
)
from megatron_magi.training.process.rank_0 import from_rank_0
from megatron_magi.training.process.whole_files import partial_folder
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig

Norms = dict[str, tuple[tuple[int, ...], float]]
"""Shape and L2 norm by parameter."""


@dataclass(frozen=True)
class GradientDump:
    """What train.dump_gradients asks for."""

    run: Path
    """The run's folder, visible to all ranks."""
    iterations: tuple[int, ...]

    @staticmethod
    def start(config: RunConfig, after_iteration: int) -> GradientDump:
        """The dump of a run that continues after an iteration. Deletes other starts' later ones."""
        from_rank_0(lambda: forget_gradients(config.folder, after_iteration))
        return GradientDump(config.folder, tuple(config.train.dump_gradients))

    def write_if_due(self, chunks: list[Any], iteration: int) -> None:
        """Write the gradients of `iteration` if they are wanted; every rank calls it.

        Call it after the schedule has reduced the gradients and before the optimizer's step.

        Raises:
            RecipeError: a rank could not write; the same on every rank.

        Cost: every gradient crosses the tensor-parallel group and goes to disk; a barrier.
        """
        if iteration not in self.iterations:
            return
        gather_reduced_parts(chunks)
        partial = from_rank_0(lambda: partial_folder(gradient_path(self.run, iteration)))
        norms = _agreed(_write_stage(chunks, partial))
        from_rank_0(lambda: finish(partial, norms))


@torch.no_grad()
def gather_reduced_parts(chunks: list[Any]) -> None:
    """With a distributed optimizer, complete every rank's gradient buffers in place.

    Here, the parts that other ranks' optimizers read hold unreduced sums that nothing reads, so
    training does not change.
    """
    for chunk in chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                mine = bucket.grad_data.chunk(ranks.size())[ranks.rank()]
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=ranks)


def whole_gradients(chunks: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """(global name, whole gradient) of this stage's parameters, one at a time.

    The first data-parallel and context-parallel ranks iterate, all tensor-parallel ranks of them
    together; the gradient is whole on the first tensor-parallel rank. Tied embeddings belong to
    the first stage.
    """
    for chunk in model_chunks(chunks):
        config = get_model_config(chunk)
        for name, param in named_global_parameters(chunk):
            if getattr(param, "shared_embedding", False) and not chunk.pre_process:
                continue
            gradient: Tensor = param.main_grad  # type: ignore[attr-defined]
            dim = sliced_dim(param)
            if dim >= 0:
                gradient = _gathered(gradient, dim, num_stacked(name, config))
            yield name, gradient


def _gathered(piece: Tensor, dim: int, num_parts: int) -> Tensor:
    """All tensor-parallel pieces joined on the first rank; on others, their own piece.

    A rank's piece of a weight of several stacked parts has its slice of each part.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return piece
    first = group.rank() == 0
    pieces = [torch.empty_like(piece) for _ in range(group.size())] if first else None
    dist.gather(piece.contiguous(), pieces, dst=dist.get_global_rank(group, 0), group=group)
    if pieces is None:
        return piece
    cut = [p.chunk(num_parts, dim) for p in pieces]
    return torch.cat([parts[k] for k in range(num_parts) for parts in cut], dim)


def _write_stage(chunks: list[Any], partial: Path) -> Norms | str:
    """Write this stage's gradients on one of its ranks; return their norms, or the error."""
    norms: Norms = {}
    trouble = ""
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) > 0:
        return norms
    for name, gradient in whole_gradients(chunks):
        if parallel_state.get_tensor_model_parallel_rank() > 0 or trouble:
            continue  # the other ranks still send their pieces
        try:
            norm = write_gradient(partial, name, gradient.float().cpu().numpy())
        except OSError as error:
            trouble = str(error)
        else:
            norms[name] = (tuple(gradient.shape), norm)
    return trouble or norms


def _agreed(mine: Norms | str) -> Norms:
    """The norms of all ranks, on every rank."""
    answers: list[Norms | str] = [{}] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    norms: Norms = {}
    for answer in answers:
        if isinstance(answer, str):
            raise RecipeError(
                f"train.dump_gradients needs a folder that can be written, got {answer}; make "
                f"room, or set log.dir"
            )
        twice = norms.keys() & answer.keys()
        assert not twice, f"two ranks wrote {sorted(twice)} into one file"
        norms |= answer
    return norms
