"""Maps each tensor of a HuggingFace Llama to a part of ours: one table for both directions.

Every tensor of theirs is a view of a tensor of ours, so importing copies into the views and
exporting copies out of them, one tensor at a time. Both keep [out, in] matrices and rotate halves,
so no row is permuted.

Legend of shapes: V vocabulary, P padded vocabulary, E hidden_size, F ffn_hidden_size, H query
heads, G key/value heads, n = H / G query heads a group, D head_dim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from torch import Tensor

from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_values import ModelConfig

View = Callable[[Tensor, ModelConfig], Tensor]


def whole(w: Tensor, m: ModelConfig) -> Tensor:
    """The same shape on both sides."""
    return w


def used_rows(w_PE: Tensor, m: ModelConfig) -> Tensor:
    """[P, E]: the first V rows; rows of padding follow."""
    return w_PE[: m.vocab_size]


def queries(w: Tensor, m: ModelConfig) -> Tensor:
    """[G, n + 2, D, E]: the n query heads of each group."""
    return _groups(w, m)[:, :-2]


def keys(w: Tensor, m: ModelConfig) -> Tensor:
    """[G, n + 2, D, E]: the key head of each group, after its query heads."""
    return _groups(w, m)[:, -2]


def values(w: Tensor, m: ModelConfig) -> Tensor:
    """[G, n + 2, D, E]: the value head of each group, last."""
    return _groups(w, m)[:, -1]


def gate(w: Tensor, m: ModelConfig) -> Tensor:
    """[2 F, E]: the upper half, which goes through silu."""
    return w[: m.ffn_hidden_size]


def up(w: Tensor, m: ModelConfig) -> Tensor:
    """[2 F, E]: the lower half."""
    return w[m.ffn_hidden_size :]


TABLE: dict[str, dict[str, View]] = {
    "embedding.word_embeddings.weight": {"model.embed_tokens.weight": used_rows},
    "decoder.layers.N.input_layernorm.weight": {"model.layers.N.input_layernorm.weight": whole},
    "decoder.layers.N.self_attention.linear_qkv.weight": {
        "model.layers.N.self_attn.q_proj.weight": queries,
        "model.layers.N.self_attn.k_proj.weight": keys,
        "model.layers.N.self_attn.v_proj.weight": values,
    },
    "decoder.layers.N.self_attention.linear_proj.weight": {
        "model.layers.N.self_attn.o_proj.weight": whole
    },
    "decoder.layers.N.pre_mlp_layernorm.weight": {
        "model.layers.N.post_attention_layernorm.weight": whole
    },
    "decoder.layers.N.mlp.linear_fc1.weight": {
        "model.layers.N.mlp.gate_proj.weight": gate,
        "model.layers.N.mlp.up_proj.weight": up,
    },
    "decoder.layers.N.mlp.linear_fc2.weight": {"model.layers.N.mlp.down_proj.weight": whole},
    "decoder.final_layernorm.weight": {"model.norm.weight": whole},
    "output_layer.weight": {"lm_head.weight": used_rows},
}
"""Our name: {their name: which part of ours it is}. N is a layer's number. A tied output has no
tensor of its own on either side."""

DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors of old folders that follow from config.json."""
NAMED = 6
"""Number of names in an error, before "and N more"."""


def hf_views(ours: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Their names, each with its view of our tensors; a view may have more dimensions than theirs.

    Args:
        ours: every parameter of the whole model by its name, or stand-ins of the same shape.
    """
    views: dict[str, Tensor] = {}
    for name, tensor in ours.items():
        number = re.search(r"layers\.(\d+)\.", name)
        layer = "" if number is None else number[1]
        parts = TABLE.get(name.replace(f".{layer}.", ".N.") if layer else name)
        assert parts is not None, f"a parameter without a counterpart: {name}"
        views |= {
            theirs.replace(".N.", f".{layer}."): f(tensor, model) for theirs, f in parts.items()
        }
    return views


def hf_shape(view: Tensor) -> tuple[int, ...]:
    """The shape that the tensor has in their files: all but the last dimension joined to rows."""
    if view.dim() == 1:
        return (len(view),)
    return (math.prod(view.shape[:-1]), view.shape[-1])


def clear_padding(ours: Mapping[str, Tensor], model: ModelConfig) -> None:
    """Set the rows of the padded vocabulary to 0."""
    for name, parts in TABLE.items():
        if used_rows in parts.values() and name in ours:
            ours[name][model.vocab_size :].zero_()


def check_tensors(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare names and shapes of a folder's tensors with those that its config.json implies.

    Raises:
        RecipeError: missing tensors, extra ones, or other shapes, by name.
    """
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted and not DERIVED.fullmatch(name)]
    shapes = [
        f"{name} {list(found[name])} (required: {list(shape)})"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    kinds = [("missing", missing), ("without a counterpart", extra), ("of another shape", shapes)]
    wrong = [f"{kind}: {_some(names)}" for kind, names in kinds if names]
    if wrong:
        raise RecipeError(
            f"the tensors must be those that config.json describes, got {'; '.join(wrong)}; "
            f"download the folder again, or convert another model"
        )


def _groups(w: Tensor, m: ModelConfig) -> Tensor:
    per_group = m.num_attention_heads // m.num_query_groups
    return w.unflatten(0, (m.num_query_groups, per_group + 2, m.kv_channels))


def _some(names: list[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
