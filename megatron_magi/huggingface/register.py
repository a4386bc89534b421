"""Putting magi's attention into Transformers under a name."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from megatron_magi import MagiConfig
from megatron_magi.checks import instance
from megatron_magi.huggingface.attention_function import HeadRows, attend
from megatron_magi.huggingface.mask_request import request_mask

NAME = "magi"
"""The name for ``attn_implementation``."""


def register(engine: MagiConfig | None = None) -> None:
    """Let ``attn_implementation="magi"`` mean this engine; calling it again changes the engine.

    Args:
        engine: its ``kernel_backend`` and ``deterministic`` hold for batches on one device; those
            of `dispatch_batch` bring their own. None: the default.

    Raises:
        TypeError: an engine that is no MagiConfig.
        ImportError: Transformers is not installed, or is older than the registries that this
            needs. The tests ran with 5.24.
    """
    used = MagiConfig() if engine is None else engine
    instance(used, MagiConfig, "engine", "pass MagiConfig(...) or None")
    attention, masks = _registries()

    def magi(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        return attend(module, HeadRows(query, key, value), attention_mask, options, used)

    attention.register(NAME, magi)
    masks.register(NAME, request_mask)


def _registries() -> tuple[Any, Any]:
    """(the registry of attention functions, that of mask functions), of a version we know."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            f"register() needs transformers 5, got {error}; pip install transformers"
        ) from error
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(
            "register() needs a transformers whose mask functions take q_length, got an older one; "
            "pip install --upgrade transformers"
        )
    return AttentionInterface, AttentionMaskInterface
