"""The largest attention logit of every head, for Megatron's QK-clip and its log.

Megatron's `optimizer/qk_clip.py` and `Attention.clip_qk` read it from the core attention's
`current_max_attn_logits` after the optimizer's step, and then set that attribute to None.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_magi.config import MagiConfig
from megatron_magi.core.kernel.select import select_backend

SETTINGS = ("qk_clip", "log_max_attention_logit")


def wants_max_logits(config: TransformerConfig) -> bool:
    """True if the model clips or logs its largest logits."""
    return any(getattr(config, name, False) for name in SETTINGS)


def check_max_logits(
    config: TransformerConfig, magi_config: MagiConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a kernel that does not find the largest logit, and a layout in which Megatron cannot
    clip.

    Raises:
        NotImplementedError: names the setting, what would run and what to set.
    """
    if not wants_max_logits(config):
        return
    check_clip_layout(config)
    asked = magi_config.kernel_backend
    runs = select_backend(asked, device, dtype)
    if not runs.finds_max_logits:
        setting = next(name for name in SETTINGS if getattr(config, name, False))
        raise NotImplementedError(
            f"{setting} requires a kernel that finds the largest logits ('cuda' on Hopper, or "
            f"'reference'), got {runs.name!r} (kernel_backend={asked!r}, {dtype} on {device}); set "
            f"{setting}=False, or kernel_backend='reference', which is slow"
        )


def check_clip_layout(config: Any) -> None:
    """Refuse clipping on split weights, which fails in the middle of training.

    Args:
        config: of a model, or Megatron's arguments.

    Raises:
        NotImplementedError: ``qk_clip`` with tensor parallelism.
    """
    tp_size = config.tensor_model_parallel_size
    if getattr(config, "qk_clip", False) and tp_size > 1:
        # Attention._clip_linear_qkv views a rank's weight by the whole model's sizes (0.16.1 to
        # 0.20-dev): a RuntimeError in the middle of training, at the first logit above the limit.
        raise NotImplementedError(
            f"qk_clip requires tensor_model_parallel_size=1, got {tp_size}: Megatron's clip_qk "
            f"fails on a slice of the weights; set qk_clip=False (log_max_attention_logit works)"
        )


def record_max_logits(core: Any, max_logits_H: Tensor) -> None:
    """Raise core.current_max_attn_logits, [heads of this TP rank], to this microbatch's maxima.

    A recomputed layer calls it twice, which changes nothing.
    """
    before = core.current_max_attn_logits
    core.current_max_attn_logits = (
        max_logits_H if before is None else torch.maximum(before, max_logits_H)
    )
