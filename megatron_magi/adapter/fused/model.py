"""Megatron's GPTModel with the fused cross entropy."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_magi.adapter.fused.cross_entropy import cross_entropy


class FusedLossGPTModel(GPTModel):  # type: ignore[misc]
    """GPTModel with the same parameters. The backward pass overwrites the logits, so each forward
    pass allows one backward pass."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Megatron's: labels [batch, rows], logits [rows, batch, vocabulary of this rank].

        Returns:
            float32 [batch, rows], nats.
        """
        losses = cross_entropy(
            logits.contiguous(), labels.transpose(0, 1).contiguous(), self.pg_collection.tp
        )
        return losses.transpose(0, 1).contiguous()
