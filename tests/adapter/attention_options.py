"""What runs with sinks or QK-clip need beside the tiny Llama."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.qk_clip import clip_qk

from megatron_magi.adapter.model_chunks import model_chunks


@torch.no_grad()
def set_sinks(models: list[Any]) -> None:
    """Another sink for every head, the same in every layout: 1.5 sin(head), heads from 1."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for model in models:
        for name, sink in model.named_parameters():
            if name.endswith("softmax_offset"):
                first = 1 + rank * len(sink)
                sink.copy_(1.5 * torch.arange(first, first + len(sink)).sin())


def clip(chunks: list[Any], log_only: bool) -> float:
    """Megatron's QK-clip after a step, or its log only; the largest logit of the model."""
    # It looks for the layers behind the two wrappers of a 16-bit model.
    wrapped = [SimpleNamespace(module=SimpleNamespace(module=c)) for c in model_chunks(chunks)]
    largest = torch.tensor(float(clip_qk(wrapped, log_max_only=log_only)))
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return float(largest)
