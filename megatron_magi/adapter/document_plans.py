"""Plans of one microbatch's documents, for the full and the window layers of a model."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from megatron.core.transformer import TransformerConfig

from megatron_magi.adapter.model_shape import head_shape, token_multiple, window_layers
from megatron_magi.checks import instance, word
from megatron_magi.config import MagiConfig
from megatron_magi.core.mask import AttnMask, builders
from megatron_magi.core.mask.mask import MaskOfLayers
from megatron_magi.core.plan import AttnPlan, TokenLayout
from megatron_magi.core.runtime.plan_cache import layer_plans_for

MaskKind = Literal["causal", "full"]
"""Visibility inside a document: "causal" (itself and all tokens before it) or "full"."""


def document_plans(
    bounds: npt.NDArray[np.int64],
    model_config: TransformerConfig,
    cp: Any,
    config: MagiConfig,
    mask: MaskOfLayers | MaskKind = "causal",
) -> tuple[AttnPlan | None, AttnPlan | None]:
    """Plan the full layers and the window layers of one microbatch, on one token layout.

    Args:
        bounds: int64 [num_docs + 1], as in `make_packed_seq_params`.
        model_config: a TransformerConfig, or anything with its fields, such as Megatron's
            arguments.
        cp: the context-parallel group, or its size, for which no process has to run.

    Returns:
        (plan, window plan); None where the model has no such layers.

    Raises:
        TypeError, ValueError, NotImplementedError: as `make_packed_seq_params`.
    """
    windows = window_layers(model_config)
    _check_mask(mask, int(bounds[-1]), any(windows))
    if isinstance(mask, str):
        mask = builders.from_cu_seqlens(bounds, causal=mask == "causal")
    whole, local = mask if isinstance(mask, tuple) else (mask, mask)
    masks: dict[bool, AttnMask] = {}
    if not all(windows):
        masks[False] = whole
    if any(windows):
        masks[True] = builders.within_window(local, tuple(model_config.window_size))
    plans = layer_plans_for(
        tuple((each, windows.count(has_window)) for has_window, each in masks.items()),
        cp,
        head_shape(model_config),
        config,
        token_multiple=token_multiple(model_config),
    )
    _check_routed_rows(plans[0].layout, model_config)
    by_kind = dict(zip(masks, plans, strict=True))
    return by_kind.get(False), by_kind.get(True)


def _check_routed_rows(layout: TokenLayout, model_config: TransformerConfig) -> None:
    has_experts = getattr(model_config, "num_moe_experts", None)
    if has_experts and layout.padded_seqlen > layout.total_seqlen:
        raise NotImplementedError(
            f"a model with experts requires a stream that needs no padding, got "
            f"{layout.total_seqlen} tokens, which {layout.cp_size} ranks hold as "
            f"{layout.padded_seqlen}: the router would count padding rows; pack documents to a "
            f"length that pipeline_seq_length leaves as it is"
        )


def _check_mask(mask: MaskOfLayers | MaskKind, total: int, has_windows: bool) -> None:
    if not isinstance(mask, tuple):
        instance(mask, (AttnMask, str), "mask", "pass a mask, 'causal' or 'full'")
    if isinstance(mask, str):
        word(mask, "mask", get_args(MaskKind))
        return
    if isinstance(mask, tuple) and (len(mask) != 2 or not has_windows):
        raise ValueError(
            f"several masks must be two, (layers without a window, window layers), for a model "
            f"with window_size, got {len(mask)} masks and {'a' if has_windows else 'no'} "
            f"window_size; pass one mask for all layers, or set window_size"
        )
    for each in mask if isinstance(mask, tuple) else (mask,):
        instance(each, AttnMask, "mask", "build one with megatron_magi.masks")
        if each.total_seqlen_q != total or each.total_seqlen_k != total:
            raise ValueError(
                f"mask and cu_seqlens must be about one stream, got a mask of "
                f"{each.total_seqlen_q} x {each.total_seqlen_k} and {total} tokens; "
                f"build the mask for {total} tokens"
            )
