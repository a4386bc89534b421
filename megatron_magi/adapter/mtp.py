"""Multi-token prediction: Megatron's shift by one token, in the order of the packed stream.

Every depth of multi-token prediction shifts token ids, positions, labels and loss mask by one
token. Megatron's `roll_tensor` takes the neighbour in memory, or exchanges the ends of two mirrored
pieces with the neighbouring ranks; after magi's dispatch neither is the next token. `install_mtp`
replaces it by a shift that follows the plan. Three of Megatron's numbers also depend on how many
counted tokens a rank holds; magi's shift returns the sum over all CP ranks, so that they equal
those of a run on one rank:

- the loss of a depth is divided by its own counted tokens and multiplied by those of
  the main loss, both of one rank;
- without `calculate_per_token_loss` it is divided by one rank's counted tokens;
- the logged loss is the mean of the ranks' means.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from megatron_magi.adapter.monkeypatch import wrap_in_megatron
from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.core.comm.process_group import group_size, resolve_group
from megatron_magi.core.runtime.shift import shift_tokens

Function = Callable[..., Any]

LOGGERS = ("save_loss_to_tracker", "save_metrics_to_tracker")
"""Megatron's functions that log a depth's loss: until 0.18, and since 0.19."""


class _LastCount:
    """How many ranks the sum of the last roll covers, for the loss that is logged after it."""

    num_ranks = 1


def install_mtp() -> None:
    """Make Megatron's multi-token prediction follow magi's plans; `attach` calls it.

    Batches without `MagiPackedSeqParams` use the stock functions. A second call changes nothing.
    """
    wrap_in_megatron(multi_token_prediction, "roll_tensor", _shift_by_plan)
    if hasattr(multi_token_prediction, "process_mtp_loss"):
        wrap_in_megatron(multi_token_prediction, "process_mtp_loss", _loss_by_stream_counts)
    helper = multi_token_prediction.MTPLossLoggingHelper
    for name in LOGGERS:
        stock = getattr(helper, name, None)
        if stock is not None and not hasattr(stock, "__wrapped__"):
            setattr(helper, name, staticmethod(_log_stream_loss(stock)))


def check_mtp(config: Any) -> None:
    """Refuse what multi-token prediction cannot do on dispatched tokens.

    Raises:
        NotImplementedError: names the setting, its value and what to set.
    """
    if getattr(config, "mtp_standalone", False):
        raise NotImplementedError(
            "multi-token prediction requires its layers on the last pipeline stage here, got a "
            "pipeline_model_parallel_layout that gives them a stage of their own; put them with "
            "the loss"
        )
    if config.recompute_method == "uniform" and not can_recompute():
        raise NotImplementedError(
            "multi-token prediction on packed tokens requires layers that can be recomputed with "
            "packed_seq_params, which megatron-core has since 0.19, got recompute_granularity="
            "'full' on an older one; set 'selective', or use a newer megatron-core"
        )
    check_hidden_state_mixing(config)


def can_recompute() -> bool:
    """True if these layers can be recomputed with packed_seq_params. Megatron 0.18 calls its
    recomputation with an argument that it does not have."""
    layer = multi_token_prediction.MultiTokenPredictionLayer
    called_with = {"packed_seq_params", "padding_mask"} & {*_names(layer.forward)}
    return called_with <= {*_names(layer._checkpointed_forward)}


def _names(function: Function) -> list[str]:
    return list(inspect.signature(function).parameters)


def check_hidden_state_mixing(config: Any) -> None:
    """Refuse a random choice by a row's place where rows change places.

    Args:
        config: of a model, or Megatron's arguments.

    Raises:
        NotImplementedError: ``mtp_hsm`` with context or sequence parallelism.
    """
    spread = config.context_parallel_size > 1 or config.sequence_parallel
    if getattr(config, "mtp_hsm", False) and spread:
        raise NotImplementedError(
            f"hidden-state mixing (mtp_hsm) requires all rows of the stream on one rank, because "
            f"Megatron draws its random choice by the row's place on a rank, got "
            f"context_parallel_size={config.context_parallel_size} and sequence_parallel="
            f"{config.sequence_parallel}; set mtp_hsm=False, or these to 1 and False"
        )


def next_tokens(x: Tensor, packed: MagiPackedSeqParams, dim: int = -1) -> Tensor:
    """Every row's next row in the packed stream; 0 at the end of a document, and on padding.

    Args:
        x: this rank's rows in `dim`, any dtype; differentiable.

    Raises:
        ValueError: packed parameters of a model without multi-token prediction.

    Cost: one row is received for every row whose next row lies on another rank.
    """
    if packed.last_rows is None:
        raise ValueError(
            "multi-token prediction requires packed parameters that know the documents' last rows, "
            "got none; make them with make_packed_seq_params from the model's own config"
        )
    flags = x.dtype == torch.bool
    shifted = shift_tokens(x.byte() if flags else x, 1, packed.token_plan, packed.cp_group, dim)
    shifted = shifted.index_fill(dim, packed.last_rows, 0)
    return shifted.bool() if flags else shifted


def _shift_by_plan(stock: Function) -> Function:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def roll_tensor(tensor: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(tensor, *args, **kwargs).arguments
        packed = given.get("packed_seq_params")
        if not isinstance(packed, MagiPackedSeqParams):
            _LastCount.num_ranks = 1
            return stock(tensor, *args, **kwargs)
        if tensor is None:
            return None, None
        shifts = given.get("shifts", -1)
        if shifts != -1:
            raise NotImplementedError(
                f"a roll of dispatched tokens must be by one to the left (shifts=-1), got "
                f"{shifts}; roll several times"
            )
        shifted = next_tokens(tensor, packed, given.get("dims", -1))
        _LastCount.num_ranks = group_size(packed.cp_group)
        return shifted, _sum(shifted, packed) if given.get("return_sum", True) else None

    return roll_tensor


def _sum(x: Tensor, packed: MagiPackedSeqParams) -> Tensor:
    """The sum over all rows of the stream. Cost: one all-reduce of one number."""
    total = x.detach().sum()
    group = resolve_group(packed.cp_group)
    if group is not None and group_size(group) > 1:
        dist.all_reduce(total, group=group)
    return total


def _loss_by_stream_counts(stock: Function) -> Function:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        packed = given.get("packed_seq_params")
        rows = given.get("labels")
        rows = given.get("input_ids") if rows is None else rows
        if isinstance(packed, MagiPackedSeqParams) and rows is not None:
            if given.get("loss_mask") is None:  # Megatron assumes 1 for every token, 0 for padding
                assert packed.is_token is not None, "made with last_rows"
                given["loss_mask"] = packed.is_token.to(rows.dtype).expand_as(rows)
            if given["config"].calculate_per_token_loss:
                derived = given.get("labels") is None
                given["config"] = _scaled_by_count(
                    given["config"], given["loss_mask"], packed, derived
                )
        return stock(*call.args, **call.kwargs)

    return process_mtp_loss


def _scaled_by_count(
    config: Any, loss_mask: Tensor, packed: MagiPackedSeqParams, derived: bool
) -> Any:
    """A config with which Megatron's loss of a depth uses counts over the whole stream.

    With a per-token loss Megatron computes ``factor * loss * rank's main count / rank's count of
    the depth``, and otherwise ``factor * loss / count of the depth``. The depth's count comes from
    magi's shift, over all ranks. If the factor holds the main count, also over all ranks, the
    second formula gives what the first would give on one rank. (A later correction of the first
    formula would not do: a rank's main count may be 0 while it holds tokens that count at a depth.)
    """
    counted = next_tokens(loss_mask, packed) if derived else loss_mask
    ours = copy.copy(config)
    ours.calculate_per_token_loss = False
    ours.mtp_loss_scaling_factor = config.mtp_loss_scaling_factor * _sum(counted, packed)
    return ours


def _log_stream_loss(stock: Function) -> Function:
    """Multiply the logged loss by the number of ranks: Megatron averages over them, but the parts
    of one mean must add up."""

    @functools.wraps(stock)
    def save(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(loss * _LastCount.num_ranks, *args, **kwargs)

    return save
