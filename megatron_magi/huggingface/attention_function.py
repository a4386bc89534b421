"""Attention for the layers of Transformers' models: their tensors and options, by this engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_magi import HeadShape, MagiConfig, Softmax, dist_attn, flex_flash_attn_func
from megatron_magi.core.tensor_checks import tensor
from megatron_magi.huggingface.batch_documents import BatchShape
from megatron_magi.huggingface.cp_batch import DispatchedBatch, carried_batch
from megatron_magi.huggingface.layer_kinds import other_layers
from megatron_magi.huggingface.mask_request import MaskRequest

READ = {"dropout", "scaling", "sliding_window", "softcap", "is_causal", "s_aux", "position_ids",
        "cu_seq_lens_q", "cu_seq_lens_k", "magi_batch", "output_attentions"}  # fmt: skip
"""The options of a layer that are honoured or refused by name."""
WITHOUT_EFFECT = {"use_cache", "cache_position", "output_hidden_states", "output_router_logits",
                  "return_dict", "num_items_in_batch", "max_length_q", "max_length_k", "labels",
                  "shift_labels", "logits_to_keep", "seq_idx"}  # fmt: skip
"""Options that say nothing about attention, or again what others say."""


@dataclass(frozen=True)
class HeadRows:
    """Queries, keys and values of a layer, as Transformers has them."""

    query: Tensor
    """[B, H, S, D]."""
    key: Tensor
    """[B, G, S, D]."""
    value: Tensor
    """[B, G, S, E]."""

    def rows(self) -> list[Tensor]:
        """q [B * S, H, D], k and v likewise, in autocast's dtype where that is on."""
        tensors = [self.query, self.key, self.value]
        kind = self.query.device.type
        if torch.is_autocast_enabled(kind):
            tensors = [x.to(torch.get_autocast_dtype(kind)) for x in tensors]
        return [x.transpose(1, 2).flatten(0, 1) for x in tensors]


def attend(
    module: Any, heads: HeadRows, given: Any, options: Mapping[str, Any], engine: MagiConfig
) -> tuple[Tensor, None]:
    """The attention of a layer.

    Args:
        module: the layer's attention module, which may say by ``is_causal`` that it is not causal.
        heads: its queries, keys and values.
        given: what the mask function has returned, or None.
        options: what else the layer passes.
        engine: kernel and determinism where the batch is on one device; a dispatched batch has its
            own.

    Returns:
        (out [B, S, H, E], None).

    Raises:
        NotImplementedError: dropout, attention without causality, keys of a cache, attention
            weights as output, options that this attention does not know, and packed rows in a
            model with layers of another kind.
        ValueError, TypeError: masks and options that do not fit together, and rows of a dispatched
            batch without it.
    """
    _refuse(module, heads, options)
    asked = _request(heads, given, options)
    softmax = _softmax(options)
    batch = options.get("magi_batch")
    _check_carried(batch, options)
    if batch is not None:
        _check_spread(batch, asked, options)
        out = _spread(heads, asked, softmax, batch)
    else:
        mask = _mask_of(asked, options)
        _check_other_layers(module, asked, options)
        out = _on_one_device(heads, mask, softmax, engine)
    num_sequences, _, num_tokens, _ = heads.query.shape
    return out.unflatten(0, (num_sequences, num_tokens)), None


def _on_one_device(heads: HeadRows, mask: Any, softmax: Softmax, engine: MagiConfig) -> Tensor:
    out, _ = flex_flash_attn_func(
        *heads.rows(),
        slices=mask,
        softmax_scale=softmax.scale,
        softcap=softmax.softcap,
        sink=softmax.sink,
        backend=engine.kernel_backend,
        deterministic=engine.deterministic,
    )
    return out


def _spread(heads: HeadRows, asked: MaskRequest, softmax: Softmax, batch: Any) -> Tensor:
    q, k, v = heads.rows()
    shape = HeadShape(q.shape[1], k.shape[1], q.shape[2], q.element_size(), v.shape[2])
    out, _ = dist_attn(q, k, v, batch.plan(asked.window, shape), batch.cp_group, softmax)
    return out


def _check_carried(batch: Any, options: Mapping[str, Any]) -> None:
    """A rank's rows would attend to each other alone, or by another batch's plan."""
    carried = carried_batch(options.get("position_ids"))
    if carried is not None and carried is not batch:
        raise ValueError(
            f"rows that dispatch_batch gave need the magi_batch that it gave with them, got "
            f"{'none' if batch is None else 'that of another batch'}; call "
            f"model(**dispatch_batch(...)), which a model needs whose layers pass their options on"
        )


def _check_spread(batch: Any, asked: MaskRequest, options: Mapping[str, Any]) -> None:
    """A dispatched batch names its documents itself, so that nothing else may."""
    others = {"an attention_mask": asked.padding, "cu_seq_lens_q": options.get("cu_seq_lens_q")}
    found = [name for name, value in others.items() if value is not None]
    found += [] if isinstance(batch, DispatchedBatch) else [type(batch).__name__]
    if found:
        raise TypeError(
            f"magi_batch must be what dispatch_batch returns, without other documents or padding "
            f"with it, got {', '.join(found)}; call model(**dispatch_batch(...)) with a Packing, "
            f"which a model needs that makes no attention_mask of its own"
        )


def _check_other_layers(module: Any, asked: MaskRequest, options: Mapping[str, Any]) -> None:
    """States and convolutions take no notice of documents, unless they are told by seq_idx."""
    others = other_layers(getattr(module, "config", None))
    if others and asked.has_packed_rows and options.get("seq_idx") is None:
        raise NotImplementedError(
            f"packed rows need layers that mix tokens by attention alone, got {others}; give each "
            f"sequence one document, or pass seq_idx if the model's other layers read it"
        )


def _softmax(options: Mapping[str, Any]) -> Softmax:
    sink = options.get("s_aux")
    return Softmax(
        scale=options.get("scaling"),
        softcap=options.get("softcap") or 0.0,
        sink=None if sink is None else sink.reshape(1, -1),
    )


def _request(heads: HeadRows, given: Any, options: Mapping[str, Any]) -> MaskRequest:
    """The mask function's result, or the layer's window over whole sequences if there is none."""
    window = options.get("sliding_window")
    if given is None:
        return MaskRequest(BatchShape(heads.query.shape[0], heads.query.shape[2]), window)
    if not isinstance(given, MaskRequest):
        raise NotImplementedError(
            f"attention by magi needs a mask of documents, windows and padding, got a "
            f"{type(given).__name__} {list(getattr(given, 'shape', []))}; pass attention_mask as "
            f"[sequences, tokens], or position_ids that restart"
        )
    if window is not None and window != given.window:
        raise ValueError(
            f"a layer must have the window of its mask, got a window of {window} tokens and a mask "
            f"with {given.window}; give the configuration one sliding_window"
        )
    return given


def _mask_of(asked: MaskRequest, options: Mapping[str, Any]) -> Any:
    q_sums, k_sums = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if options.get(name) is not None:
            tensor(options[name], name)
    are_same = q_sums is not None and k_sums is not None and torch.equal(q_sums, k_sums)
    if k_sums is not None and not are_same:
        raise NotImplementedError(
            "cu_seq_lens_k must equal cu_seq_lens_q, got others; pass the same tensor twice"
        )
    return asked.mask(options.get("position_ids"), q_sums)


def _refuse(module: Any, heads: HeadRows, options: Mapping[str, Any]) -> None:
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    num_q, num_k = heads.query.shape[2], heads.key.shape[2]
    unknown = [k for k, v in options.items() if v is not None and k not in READ | WITHOUT_EFFECT]
    for is_wrong, needs, got, remedy in (
        (options.get("dropout"), "no attention dropout", f"dropout={options.get('dropout')}",
         "set attention_dropout=0.0 in the model's configuration"),
        (not causal, "causal attention", "a layer with is_causal=False",
         "use another attn_implementation for this model"),
        (num_q != num_k, "as many keys as queries", f"{num_q} queries and {num_k} keys",
         "call the model with use_cache=False, or decode after "
         "model.set_attn_implementation('sdpa')"),
        (options.get("output_attentions"), "output_attentions=False", "True",
         "the weights are never built; use attn_implementation='eager' to see them"),
        (unknown, "options that it knows", ", ".join(unknown),
         "leave them out, or use another attn_implementation for this model"),
    ):  # fmt: skip
        if is_wrong:
            raise NotImplementedError(f"attention by magi needs {needs}, got {got}; {remedy}")
