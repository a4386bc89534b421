"""One microbatch: from the full stream to this rank's rows as the model's keyword arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_magi.adapter.carried_plan import carry_plan
from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.adapter.pipeline_agreement import agree_in_pipeline
from megatron_magi.checks import instance, optional_integer
from megatron_magi.core.native import solver
from megatron_magi.core.runtime.agreement.comparison import agree_on_batch
from megatron_magi.core.runtime.token_dispatch import dispatch
from megatron_magi.core.tensor_checks import tensor


@dataclass
class Batch:
    """Full (before dispatch) or local (after) rows of one microbatch, all [1, length].

    Labels must already be shifted: labels[i] is the token after tokens[i], or any token with
    loss_mask[i] == 0 at a document's end. The shift comes before dispatch, because neighbours in
    the stream are not neighbours on a rank.
    """

    tokens: Tensor | None = None
    """int64 [1, length]; None on a pipeline stage without an embedding."""

    labels: Tensor | None = None
    """int64 [1, length]; None on a pipeline stage without a loss."""

    loss_mask: Tensor | None = None
    """float32 [1, length]; 0 where the token's loss does not count; None where labels are None."""

    position_ids: Tensor | None = None
    """int64 [1, length]; only learned absolute position embeddings read it."""


@dataclass
class LocalBatch:
    """This rank's inputs of a forward step."""

    batch: Batch | None
    """Local rows; None on pipeline stages with neither an embedding nor a loss."""

    packed_seq_params: MagiPackedSeqParams
    """The plans of the microbatch."""

    @property
    def loss_mask(self) -> Tensor | None:
        """float32 [1, length], the argument of `per_token_loss`."""
        return None if self.batch is None else self.batch.loss_mask

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of GPTModel.forward: `loss = model(**local.model_inputs())`."""
        rows = self.batch
        return {
            "input_ids": None if rows is None else rows.tokens,
            "position_ids": None if rows is None else rows.position_ids,
            "labels": None if rows is None else rows.labels,
            "loss_mask": self.loss_mask,
            "attention_mask": None,
            "packed_seq_params": self.packed_seq_params,
        }


NUM_HASHED = 4096
"""A longer batch is told from others by this many of its tokens, or up to twice as many, evenly
spaced."""


def batch_id_of(tokens: Tensor) -> int:
    """64 bits that tell a batch from others.

    Args:
        tokens: integers of any shape on the host.
    """
    flat = tokens.reshape(-1)
    some = flat[:: max(1, len(flat) // NUM_HASHED)].long().contiguous()
    return int(solver.hash64(some.numpy().tobytes()))


def dispatch_batch(
    batch: Batch | None,
    packed: MagiPackedSeqParams,
    cp_group: Any,
    *,
    batch_id: int | None = None,
) -> LocalBatch:
    """Give this rank its rows of tokens, labels, loss mask and position ids.

    Every rank calls it once for every forward of a microbatch. A pipeline stage without data passes
    None, still joins the comparison of plans, and gets `LocalBatch(batch=None, ...)`. Padding rows
    get token 0, label 0 and loss mask 0. Local rows carry the plan; the model takes no
    others (see `carried_plan`).

    Args:
        batch: The full stream, equal on all CP ranks, or None on a middle pipeline stage.
        packed: From `make_packed_seq_params`, computed alike on every pipeline stage.
        cp_group: Context-parallel group; None means size 1.
        batch_id: 64 bits (a signed or unsigned integer) that tell this batch from others, the same
            on every rank, e.g. its number in the run. Context-parallel ranks compare them, since
            equal plans do not tell batches apart. Default: a hash of tokens that are on the host;
            batches that are on a device alone are not compared.

    Raises:
        TypeError: another kind of batch, of rows, of packed or of batch_id.
        ValueError: a tensor whose shape is not [1, stream length] of the plan, or a batch_id of
            more than 64 bits.
        AgreementError: context-parallel ranks have other batches or plans.
        AgreementError: for an earlier batch, tensor-parallel ranks or pipeline stages had different
            plans (see `pipeline_agreement.finish_pipeline_agreement`).
    """
    _check_batch(batch)
    needs = "make it with make_packed_seq_params, or of stock ones with from_packed_seq_params"
    instance(packed, MagiPackedSeqParams, "packed", needs)
    batch_id = optional_integer(batch_id, "batch_id", -(2**63), 2**64 - 1)
    plan = packed.token_plan
    agree_in_pipeline(plan)
    if packed.window_plan is not None and packed.window_plan is not plan:
        agree_in_pipeline(packed.window_plan)
    rows = {} if batch is None else {n: x for n, x in vars(batch).items() if x is not None}
    if not rows:
        return LocalBatch(None, packed)
    _agree_on_batch(rows, packed, cp_group, batch_id)
    return LocalBatch(Batch(**_dispatch_rows(rows, packed, cp_group)), packed)


def _check_batch(batch: Batch | None) -> None:
    instance(batch, (Batch, type(None)), "batch", "pass Batch(tokens=..., labels=...)")
    for name, x in vars(batch or Batch()).items():
        if x is None:
            continue
        tensor(x, name)
        if name != "loss_mask" and (x.is_floating_point() or x.is_complex()):
            raise TypeError(f"{name} must hold integers, got {x.dtype}; pass {name}.long()")


def _agree_on_batch(
    rows: dict[str, Tensor], packed: MagiPackedSeqParams, cp_group: Any, batch_id: int | None
) -> None:
    first = next(iter(rows.values()))
    tokens = rows.get("tokens", rows.get("labels"))
    if batch_id is None and tokens is not None and tokens.device.type == "cpu":
        batch_id = batch_id_of(tokens)
    # Every rank says something, so that one that knows and one that does not differ.
    agree_on_batch(packed.token_plan, cp_group, batch_id or 0, first.device)


def _dispatch_rows(
    rows: dict[str, Tensor], packed: MagiPackedSeqParams, cp_group: Any
) -> dict[str, Tensor]:
    """[1, num_local_tokens] of every tensor: the integers in one call, the loss mask in another."""
    plan = packed.token_plan
    full = {name: _one_row(name, x, plan.mask.total_seqlen_q) for name, x in rows.items()}
    local: dict[str, Tensor] = {}
    integers = [name for name in full if name != "loss_mask"]
    if integers:
        stacked = torch.stack([full[name].long() for name in integers], dim=1)
        columns = dispatch(stacked, plan, cp_group).unbind(1)
        for name, column in zip(integers, columns, strict=True):
            local[name] = carry_plan(column.unsqueeze(0), packed)
    if "loss_mask" in full:
        loss_mask = dispatch(full["loss_mask"].float(), plan, cp_group).unsqueeze(0)
        local["loss_mask"] = carry_plan(loss_mask, packed)
    return local


def _one_row(name: str, x: Tensor, total: int) -> Tensor:
    if tuple(x.shape) != (1, total):
        raise ValueError(
            f"{name} must be one packed stream of shape (1, {total}), the length the plan was made "
            f"for, got {tuple(x.shape)}; pack the batch into one row and plan for its length"
        )
    return x[0]
