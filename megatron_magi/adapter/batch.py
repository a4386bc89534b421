"""One microbatch: the full stream in, this rank's rows in the model's keyword arguments out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_magi.adapter.packed import MagiPackedSeqParams


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
        raise NotImplementedError


def dispatch_batch(batch: Batch | None, packed: MagiPackedSeqParams, cp_group: Any) -> LocalBatch:
    """Give this rank its rows of tokens, labels, loss mask and position ids.

    Every rank calls it for every microbatch and model chunk's forward; a stage without data passes
    None, joins the digest agreement all the same, and gets `LocalBatch(batch=None, ...)`. Rows that
    pad the stream get token 0, label 0, loss mask 0.

    Args:
        batch: The full stream, equal on all CP ranks, or None on a middle pipeline stage.
        packed: From `make_packed_seq_params`, computed alike on every stage.
        cp_group: Context-parallel group; None means size 1.

    Raises:
        ValueError: a tensor whose shape is not [1, stream length] of the plan.
    """
    raise NotImplementedError
