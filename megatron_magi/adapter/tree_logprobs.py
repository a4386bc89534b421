"""Log-probabilities of a tree's tokens from the logits of a Megatron model."""

from __future__ import annotations

from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from megatron_magi.core.runtime.tree_edges import TreeEdges
from megatron_magi.core.tensor_checks import tensor


def tree_logprobs(logits: Tensor, tokens: Tensor, edges: TreeEdges) -> Tensor:
    """fp32 [edges]: log-probability of each token that this rank predicts; differentiable.

    Args:
        logits: [1, local rows, vocabulary / tensor-parallel size], as GPTModel returns them for
            labels=None.
        tokens: int64 [rows], the token ids of the whole stream.
        edges: those of this context-parallel rank, from `tree_edges`.

    Raises:
        TypeError: no tensors.

    Cost: the all-reduces of Megatron's cross entropy over the tensor-parallel group.
    """
    tensor(logits, "logits")
    tensor(tokens, "tokens")
    rows = logits[0, edges.sources].float()
    return -vocab_parallel_cross_entropy(rows, tokens.to(rows.device)[edges.targets])
