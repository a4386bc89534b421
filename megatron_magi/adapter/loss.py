"""The loss under context parallelism: sums and token counts, divided once over all ranks.

By default Megatron divides each rank's loss by that rank's own token count and averages over ranks.
If ranks count unequal numbers of tokens, the gradient then depends on where tokens were dispatched.
calculate_per_token_loss=True divides the summed gradient once by the global token count.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_magi.core.tensor_checks import tensor


def per_token_loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A loss function for Megatron; use it as `partial(per_token_loss, local.loss_mask)`.

    Args:
        loss_mask: float32 [1, num_local_tokens].
        output: per-token losses [1, num_local_tokens] as GPTModel returns them.

    Returns:
        loss: float32 scalar, sum of the counted losses of this rank.
        num_tokens: int32 scalar, counted tokens of this rank.
        report: {"lm loss": float32 [2] detached (loss sum, count)}: add up over microbatches and
            the DP x CP group, then divide.

    Raises:
        TypeError: no tensors.
        ValueError: not one loss for each entry of the mask, e.g. an output that is already reduced.
    """
    tensor(loss_mask, "loss_mask")
    tensor(output, "output")
    if loss_mask.numel() != output.numel():
        raise ValueError(
            f"per_token_loss requires one loss for each entry of loss_mask, got losses "
            f"{list(output.shape)} and loss_mask {list(loss_mask.shape)}; pass local.loss_mask, "
            f"and the losses as the model returns them for labels"
        )
    weights = loss_mask.reshape(-1).float()
    # torch.where, not a product, because an uncounted row may hold inf (a pad row without keys).
    losses = torch.where(weights != 0, output.reshape(-1).float(), 0.0)
    loss = torch.sum(losses * weights)
    num_tokens = weights.sum()
    report = torch.stack([loss.detach(), num_tokens])
    return loss, num_tokens.to(torch.int32), {"lm loss": report}


def check_loss_config(config: TransformerConfig) -> None:
    """Require calculate_per_token_loss=True when context_parallel_size > 1.

    Raises:
        ValueError: per-rank averaging would weigh tokens by where they were dispatched.
    """
    if config.context_parallel_size > 1 and not config.calculate_per_token_loss:
        raise ValueError(
            f"context parallelism requires calculate_per_token_loss=True, got False with "
            f"context_parallel_size={config.context_parallel_size}; set it in the config, or the "
            f"gradient depends on how masked tokens are spread over ranks"
        )
