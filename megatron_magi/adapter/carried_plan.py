"""Local rows carry the plan that they were dispatched by, and a model takes no others.

Every token layout gives each rank equally many rows, so a row count proves nothing. Rows of another
layout, or of another batch, would be trained on with wrong neighbours and without an error.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor

from megatron_magi.adapter.packed import MagiPackedSeqParams

_ATTRIBUTE = "_magi_packed_seq_params"
_INPUTS = (("pre_process", ("input_ids", "decoder_input")), ("post_process", ("labels",)))
"""Which pipeline stages read rows, and the arguments that may hold them, in order of preference."""


def carry_plan(rows: Tensor, packed: MagiPackedSeqParams) -> Tensor:
    """Mark local rows (tokens, labels, or embeddings made from them) as dispatched by `packed`.

    `dispatch_batch` marks the rows that it returns. Call this function for a tensor that you
    computed from such rows and pass to the model instead of them, e.g. `decoder_input`.

    Returns:
        `rows` itself.
    """
    setattr(rows, _ATTRIBUTE, packed)
    return rows


def carried_plan(rows: Tensor | None) -> MagiPackedSeqParams | None:
    """What `rows` were dispatched by; None for rows that were not dispatched."""
    return getattr(rows, _ATTRIBUTE, None)


def check_rows(chunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a model chunk: check that its rows were dispatched by its plan.

    Raises:
        ValueError: tokens or labels without a plan, or with another layout than packed_seq_params.
    """
    inputs = forward_arguments(chunk, args, kwargs)
    packed = inputs.get("packed_seq_params")
    if not isinstance(packed, MagiPackedSeqParams):
        return
    for stage, names in _INPUTS:
        if not getattr(chunk, stage, False):
            continue
        name, rows = next(((n, x) for n in names if (x := inputs.get(n)) is not None), ("", None))
        if rows is not None:
            _check(name, rows, packed)


def forward_arguments(chunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a call of `chunk` passes to its forward, by name."""
    kind: Any = type(chunk)
    given = _forward_signature(kind).bind(chunk, *args, **kwargs).arguments
    return dict(list(given.items())[1:])


@functools.cache
def _forward_signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.forward)


def _check(name: str, rows: Tensor, packed: MagiPackedSeqParams) -> None:
    carried = carried_plan(rows)
    if carried is packed:
        return
    wanted = packed.token_plan.layout.digest
    if carried is not None and carried.token_plan.layout.digest == wanted:
        return
    got = "rows without a plan" if carried is None else "rows of another plan"
    raise ValueError(
        f"{name} must be rows that dispatch_batch gave for the packed_seq_params of this forward, "
        f"got {got} of shape {tuple(rows.shape)}; dispatch the batch by the same plan, and replace "
        f"whatever else slices it"
    )
