"""One microbatch: the full stream in, this rank's rows in the model's keyword arguments out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.adapter.stages import agree_on_stages
from megatron_magi.core.runtime.agreement import agree
from megatron_magi.core.runtime.token_dispatch import dispatch


@dataclass
class Batch:
    """Full (before dispatch) or local (after) rows of one microbatch, all [1, length].

    Labels are shifted already (labels[i] is the token after tokens[i], or anything with
    loss_mask[i] == 0 at a document's end): the shift must come before dispatch, because
    neighbours in the stream are not neighbours on a rank.
    """

    tokens: Tensor
    """int64 [1, length]."""

    labels: Tensor
    """int64 [1, length]."""

    loss_mask: Tensor
    """float32 [1, length]; 0 where the token's loss does not count."""

    position_ids: Tensor | None = None
    """int64 [1, length]; only learned absolute embeddings read it."""


@dataclass
class LocalBatch:
    """What a forward step needs on this rank."""

    batch: Batch | None
    """Local rows; None on pipeline stages that take no tokens and give no loss."""

    packed_seq_params: MagiPackedSeqParams | None
    """Ours; None for the dense reference."""

    attention_mask: Tensor | None = None
    """Dense mask of the reference, bool [1, 1, T, S], True = hidden (Megatron's convention)."""

    @property
    def loss_mask(self) -> Tensor | None:
        """float32 [1, length] to give to `per_token_loss`."""
        return None if self.batch is None else self.batch.loss_mask

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of GPTModel.forward: `loss = model(**local.model_inputs())`."""
        rows = self.batch
        return {
            "input_ids": None if rows is None else rows.tokens,
            "position_ids": None if rows is None else rows.position_ids,
            "labels": None if rows is None else rows.labels,
            "loss_mask": self.loss_mask,
            "attention_mask": self.attention_mask,
            "packed_seq_params": self.packed_seq_params,
        }


def dispatch_batch(batch: Batch | None, packed: MagiPackedSeqParams, cp_group: Any) -> LocalBatch:
    """Give this rank its rows of tokens, labels, loss mask and position ids.

    Every rank calls it once for every forward of a microbatch; a stage without data passes None,
    joins the digest agreement all the same, and gets `LocalBatch(batch=None, ...)`. Rows that pad
    the stream get token 0, label 0, loss mask 0.

    Args:
        batch: The full stream, equal on all CP ranks, or None on a middle pipeline stage.
        packed: From `make_packed_seq_params`, computed alike on every stage.
        cp_group: Context-parallel group; None means size 1.

    Raises:
        ValueError: a tensor whose shape is not [1, stream length] of the plan.
        AgreementError: for an earlier batch the tensor-parallel ranks or pipeline stages planned
            different things (see `stages.finish_stage_agreement`).
    """
    plan = packed.dispatch_plan
    agree_on_stages(plan)
    if packed.window_plan is not None and packed.window_plan is not plan:
        agree_on_stages(packed.window_plan)
        agree(packed.window_plan, cp_group)
    if batch is None:
        agree(plan, cp_group)
        return LocalBatch(None, packed)
    total = plan.mask.total_seqlen_q
    rows = {name: _one_row(name, x, total) for name, x in vars(batch).items() if x is not None}
    # One message of integers, one of weights: every dispatch call is also an agreement.
    integers = [name for name in rows if name != "loss_mask"]
    stacked = torch.stack([rows[name].long() for name in integers], dim=1)
    local = dispatch(stacked, plan, cp_group)
    columns = {name: local[:, i].unsqueeze(0) for i, name in enumerate(integers)}
    loss_mask = dispatch(rows["loss_mask"].float(), plan, cp_group).unsqueeze(0)
    return LocalBatch(Batch(loss_mask=loss_mask, **columns), packed)


def _one_row(name: str, x: Tensor, total: int) -> Tensor:
    if tuple(x.shape) != (1, total):
        raise ValueError(
            f"{name} must be one packed stream of shape (1, {total}), the length the plan was made "
            f"for, got {tuple(x.shape)}; pack the batch into one row and plan for its length"
        )
    return x[0]
