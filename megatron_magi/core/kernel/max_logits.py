"""The largest scaled score of every head, for optimizers that clip it (QK-clip).

It is available with the reference backend only: the fused kernels do not keep the scores' maximum,
and a second pass over all tiles in PyTorch would be slower than the attention itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.core.kernel.backend import acc_dtype
from megatron_magi.core.kernel.reference import _scores, _tiles
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.slice_table import SliceTable


def check_max_logits(backend: str, q: Tensor) -> None:
    """Refuse the call if a backend other than the reference would run.

    Raises:
        NotImplementedError: another backend would run; the error names it.
    """
    name = select_backend(backend, q.device, q.dtype).name
    if name != "reference":
        raise NotImplementedError(
            f"return_max_logits needs the reference backend (CPU tensors, or fp32), got "
            f"{name!r} for {q.dtype} on {q.device}; bound the scores by the norms of q and k rows"
        )


@torch.no_grad()
def max_logits(q_THD: Tensor, k_SGD: Tensor, table: SliceTable, softmax_scale: float) -> Tensor:
    """[H] in the accumulation dtype: the largest visible scaled score, -inf if none is visible.

    Not differentiable. Cost: the scores of a forward are computed once more.
    """
    heads = q_THD.shape[1]
    most = torch.full((heads,), -torch.inf, dtype=acc_dtype(q_THD.dtype), device=q_THD.device)
    for rows, keys, hidden in _tiles(table, heads, q_THD.device):
        scores = _scores(q_THD[rows], k_SGD[keys], softmax_scale, hidden)
        most = torch.maximum(most, scores.amax((2, 3)).flatten())
    return most
