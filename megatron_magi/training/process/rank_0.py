"""What rank 0 does or decides for all ranks, with one error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_magi.training.recipe.recipe_error import RecipeError

T = TypeVar("T")


def from_rank_0(make: Callable[[], T]) -> T:
    """The result of rank 0's make() on every rank. Every rank calls it; if it fails, none waits.

    Raises:
        RecipeError: rank 0's, on every rank. An OSError, and on the other ranks any other error of
            rank 0, is raised as one.
    """
    answer: list[Any] = [None]
    cause: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer = [(make(), None)]
        except Exception as error:
            cause, answer = error, [(None, _for_all(error))]
    dist.broadcast_object_list(answer, src=0)
    result, error_for_all = answer[0]
    if error_for_all is None:
        made: T = result
        return made
    if cause is not None and not isinstance(cause, (RecipeError, OSError)):
        raise cause  # a mistake of ours: its traceback helps
    raise error_for_all from cause


def _for_all(error: Exception) -> RecipeError:
    if isinstance(error, RecipeError):
        return error
    if isinstance(error, OSError):
        return RecipeError(
            f"the run's folders must be readable and writable, got {error}; see to permissions and "
            f"room, or set log.dir or checkpoint.dir"
        )
    return RecipeError(
        f"rank 0 must do its part for all ranks, got {type(error).__name__}: {error}; its own "
        f"output says more"
    )
