"""Converts between a HuggingFace Llama config.json and the model section of a recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_values import ModelConfig

CONFIG = "config.json"
ONE_VALUE = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Keys that have one value in our models; an absent key means that value."""
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
"""Field of `ModelConfig` to key of config.json; these keys are required."""
LEFT_OUT = ("partial_rotary_factor", "quantization_config")
"""Keys of ONE_VALUE that a Llama's config.json does not have."""
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Values that Megatron's rope_scaling fixes beside its factor."""
ROPE_TYPES = ("default", "llama3")
LARGEST_MULTIPLE = 128
"""Largest model.vocab_multiple that is proposed; it is smaller if this one would pad."""


def read_hf_model(folder: Path) -> ModelConfig:
    """The model section that fits the config.json of `folder`.

    Raises:
        RecipeError: no config.json, or a model that has no counterpart here.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise RecipeError(
            f"a HuggingFace folder needs {CONFIG}, got none in {folder}; download the whole folder"
        )
    try:
        hf = json.loads(path.read_text())
    except ValueError as error:
        raise RecipeError(f"{path} must be JSON, got {error}; download it again") from None
    if not isinstance(hf, dict):
        raise RecipeError(f"{path} must be a JSON object, got {hf!r:.60}; download it again")
    return model_from_hf(hf)


def model_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The model section that computes what a config.json describes, without padded vocabulary.

    Raises:
        RecipeError: every key that is missing or has a value without a counterpart here.
    """
    _refuse([*_other_values(hf), *_other_rope(_rope(hf))])
    sizes: dict[str, Any] = {ours: int(hf[theirs]) for ours, theirs in SIZES.items()}
    rope = _rope(hf)
    scaled = _rope_type(rope) == "llama3"
    return ModelConfig(
        **sizes,
        num_query_groups=int(hf.get("num_key_value_heads") or hf["num_attention_heads"]),
        head_dim=_head_dim(hf),
        vocab_multiple=math.gcd(int(hf["vocab_size"]), LARGEST_MULTIPLE),
        rotary_base=int(rope["rope_theta"]),
        rope_scaling=scaled,
        rope_scaling_factor=float(rope["factor"]) if scaled else ModelConfig.rope_scaling_factor,
        norm_epsilon=float(hf.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def hf_from_model(model: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that describe `model`; transformers 4 and 5 read them.

    With scaled positions, max_position_embeddings is the length that the scaling is for.
    """
    hf: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
    hf |= {key: value for key, value in ONE_VALUE.items() if key not in LEFT_OUT}
    hf |= {theirs: getattr(model, ours) for ours, theirs in SIZES.items()}
    hf |= {
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "rope_theta": float(model.rotary_base),
        "rope_scaling": None,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
    }
    if model.rope_scaling:
        hf["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            **LLAMA3_ROPE,
        }
        length = LLAMA3_ROPE["original_max_position_embeddings"] * model.rope_scaling_factor
        hf["max_position_embeddings"] = int(length)
    return hf


def check_same_model(recipe: ModelConfig, theirs: ModelConfig, folder: Path) -> None:
    """Raise RecipeError, naming the fields, when two models do not compute the same function.

    The padding of the vocabulary, and fields that only affect how weights are drawn, may differ.
    """
    names = [*SIZES, "num_query_groups", "kv_channels", "rotary_base", "rope_scaling"]
    names += ["norm_epsilon", "tie_embeddings"]
    if recipe.rope_scaling and theirs.rope_scaling:
        names.append("rope_scaling_factor")
    pairs = [(n, getattr(recipe, n), getattr(theirs, n)) for n in names]
    other = [
        f"model.{'head_dim' if name == 'kv_channels' else name} {mine} (there: {value})"
        for name, mine, value in pairs
        if mine != value
    ]
    if other:
        raise RecipeError(
            f"the recipe's model must be that of {folder}, got {', '.join(other)}; take the "
            f"section that --print-recipe prints"
        )


def _head_dim(hf: Mapping[str, Any]) -> int | None:
    """None if it follows from hidden_size, as in most recipes."""
    head_dim = int(hf.get("head_dim") or 0)
    follows = head_dim * hf["num_attention_heads"] in (0, hf["hidden_size"])
    return None if follows else head_dim


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings: in one section (transformers 5) or a section beside rope_theta (4)."""
    section = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return {"rope_theta": hf.get("rope_theta") or 10000.0, **section}


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _other_values(hf: Mapping[str, Any]) -> list[str]:
    other = [
        f"{key} {hf[key]!r} (required: {value!r})"
        for key, value in ONE_VALUE.items()
        if hf.get(key) is not None and hf[key] != value
    ]
    other += [f"no {key}" for key in ("model_type", *SIZES.values()) if hf.get(key) is None]
    numbers = (*SIZES.values(), "num_key_value_heads", "head_dim")
    odd = [key for key in numbers if not isinstance(hf.get(key), int | None)]
    return other + [f"{key} {hf[key]!r} (required: a whole number)" for key in odd]


def _other_rope(rope: Mapping[str, Any]) -> list[str]:
    kind = _rope_type(rope)
    if kind not in ROPE_TYPES:
        return [f"rope type {kind!r} (required: {' or '.join(ROPE_TYPES)})"]
    other = []
    if float(rope["rope_theta"]) != int(rope["rope_theta"]):
        other.append(f"rope_theta {rope['rope_theta']} (required: a whole number)")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        other.append(f"partial_rotary_factor {rope['partial_rotary_factor']} (required: 1.0)")
    if kind == "llama3":
        other += [
            f"rope {key} {rope.get(key)} (required: {value})"
            for key, value in LLAMA3_ROPE.items()
            if rope.get(key) != value
        ]
        if not isinstance(rope.get("factor"), int | float):
            other.append(f"rope factor {rope.get('factor')} (required: a number)")
    return other


def _refuse(other: list[str]) -> None:
    if other:
        raise RecipeError(
            f"a Llama without biases, with silu and Megatron's rotary positions is required, got "
            f"{', '.join(other)}; models of another kind cannot be converted"
        )
