"""Local rows carry the plan that they were dispatched by, and a model takes no others.

Every token layout gives each rank equally many rows, so a row count proves nothing. Rows of another
plan would be trained on with another mask, other positions or wrong neighbours, without an error.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.checks import instance
from megatron_magi.core.tensor_checks import tensor

_ATTRIBUTE = "_magi_packed_seq_params"
_INPUTS = (("pre_process", ("input_ids", "decoder_input")), ("post_process", ("labels",)))
"""Pipeline stages that read rows, and the arguments that may hold them, in order of preference."""
_ALSO = ("position_ids", "loss_mask")
"""Arguments that need not carry a plan, since callers may make them; if they do, it is the same."""


def carry_plan(rows: Tensor, packed: MagiPackedSeqParams) -> Tensor:
    """Mark local rows (tokens, labels, or embeddings made from them) as dispatched by `packed`.

    `dispatch_batch` marks the rows that it returns. Call this function for a tensor that you
    computed from such rows and pass to the model instead of them, e.g. `decoder_input`.

    Returns:
        `rows` itself.

    Raises:
        TypeError: no tensor, or no plan of magi's.
    """
    tensor(rows, "rows")
    instance(packed, MagiPackedSeqParams, "packed", "pass what dispatch_batch was given")
    setattr(rows, _ATTRIBUTE, packed)
    return rows


def keep_plan(stock: PackedSeqParams, packed: MagiPackedSeqParams) -> None:
    """Keep with stock parameters the plan by which a model selects its rows itself."""
    setattr(stock, _ATTRIBUTE, packed)


def carried_plan(rows: Tensor | PackedSeqParams | None) -> MagiPackedSeqParams | None:
    """The plan of dispatched `rows`, or of stock parameters that keep one; None without a plan."""
    return getattr(rows, _ATTRIBUTE, None)


def carry_selected(inputs: dict[str, Any], packed: MagiPackedSeqParams) -> None:
    """Mark the rows of a forward that the model selected by the plan's rows itself.

    Raises:
        ValueError: another number of tokens or labels than the plan gives to a rank.
    """
    expected = packed.token_plan.layout.num_local_tokens
    for name in ("input_ids", "labels"):
        rows = inputs.get(name)
        if rows is not None and rows.shape[-1] != expected:
            raise ValueError(
                f"{name} must be the {expected} rows that the plan gives to each rank, got shape "
                f"{tuple(rows.shape)}; select rows by the plan's, and pad documents so that the "
                f"plan pads nothing"
            )
    for _, names in _INPUTS:
        for name in names:
            if inputs.get(name) is not None:
                carry_plan(inputs[name], packed)


def check_rows(chunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a model chunk: check that its rows were dispatched by its plan.

    Raises:
        ValueError: tokens or labels without a plan, rows of another plan than packed_seq_params, or
            rows of a plan without packed_seq_params, and no positions for a model that learns them.
    """
    inputs = forward_arguments(chunk, args, kwargs)
    packed = inputs.get("packed_seq_params")
    if not isinstance(packed, MagiPackedSeqParams):
        _require_no_plan(inputs, packed)
        return
    _require_positions(chunk, inputs)
    for stage, names in _INPUTS:
        if not getattr(chunk, stage, False):
            continue
        name, rows = next(((n, x) for n in names if (x := inputs.get(n)) is not None), ("", None))
        if rows is not None:
            _check(name, rows, packed)
    for name in _ALSO:
        if carried_plan(inputs.get(name)) is not None:
            _check(name, inputs[name], packed)


def _require_positions(chunk: Any, inputs: dict[str, Any]) -> None:
    """An embedding of positions is looked up by them; rotary ones are known from the plan."""
    is_learned = getattr(chunk, "position_embedding_type", None) == "learned_absolute"
    embeds = getattr(chunk, "pre_process", False) and inputs.get("decoder_input") is None
    if is_learned and embeds and inputs.get("position_ids") is None:
        raise ValueError(
            "a model with learned absolute positions (GPTModel's default) needs position_ids, got "
            "none; put them into the Batch that is dispatched, or build the model with "
            'position_embedding_type="rope"'
        )


def _require_no_plan(inputs: dict[str, Any], packed: Any) -> None:
    """Without its plan a stream of documents would attend as one."""
    for name, rows in inputs.items():
        if isinstance(rows, Tensor) and carried_plan(rows) is not None:
            raise ValueError(
                f"{name} are rows that dispatch_batch gave by a plan, which must come with them as "
                f"packed_seq_params, got {type(packed).__name__}; call the model with "
                f"**local.model_inputs()"
            )


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
    if carried is not None and packed.digest is not None and carried.digest == packed.digest:
        return
    got = "rows without a plan" if carried is None else "rows of another plan"
    raise ValueError(
        f"{name} must be rows that dispatch_batch gave for the packed_seq_params of this forward, "
        f"got {got} of shape {tuple(rows.shape)}; dispatch the batch by the same plan, and replace "
        f"whatever else slices it"
    )
