"""config.json and the model section of a recipe say the same model, or it is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_values import ModelConfig
from megatron_magi.training.weights.hf_config import (
    check_same_model,
    hf_from_model,
    model_from_hf,
    read_hf_model,
)
from tests.training.llama_3_2 import LLAMA_3_2_1B, OURS
from tests.training.tiny_hf import LLAMA3, hf_config


def test_llama_3_2_as_both_versions_of_transformers_write_it() -> None:
    assert model_from_hf(LLAMA_3_2_1B) == OURS
    newer = {k: v for k, v in LLAMA_3_2_1B.items() if k not in ("rope_scaling", "rope_theta")}
    assert model_from_hf({**newer, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}) == OURS


def test_keys_that_are_absent_mean_what_transformers_means() -> None:
    absent = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling")
    plain = {k: v for k, v in hf_config(num_attention_heads=4).items() if k not in absent}
    del plain["tie_word_embeddings"]
    model = model_from_hf(plain)
    assert (model.num_query_groups, model.kv_channels) == (4, 8)
    assert (model.norm_epsilon, model.rotary_base) == (1e-6, 10000)
    assert (model.rope_scaling, model.tie_embeddings) == (False, False)


@pytest.mark.parametrize(
    ("vocabulary", "multiple"), [(32000, 128), (32002, 2), (32001, 1), (96, 32)]
)
def test_the_proposed_vocabulary_is_not_padded(vocabulary: int, multiple: int) -> None:
    model = model_from_hf(hf_config(vocab_size=vocabulary))
    assert (model.vocab_multiple, model.padded_vocab_size) == (multiple, vocabulary)


@settings(deadline=None)
@given(
    groups=st.integers(1, 4),
    per_group=st.integers(1, 4),
    head_dim=st.sampled_from([8, 16, 24]),
    hidden=st.sampled_from([32, 48, 64]),
    theta=st.integers(1000, 10**6),
    factor=st.none() | st.sampled_from([8.0, 32.0, 2.5]),
    tied=st.booleans(),
    epsilon=st.sampled_from([1e-5, 1e-6]),
    vocabulary=st.integers(1, 300),
)
def test_a_model_comes_back_from_its_config_json(
    groups: int,
    per_group: int,
    head_dim: int,
    hidden: int,
    theta: int,
    factor: float | None,
    tied: bool,
    epsilon: float,
    vocabulary: int,
) -> None:
    model = ModelConfig(
        num_layers=3,
        hidden_size=hidden,
        ffn_hidden_size=72,
        num_attention_heads=groups * per_group,
        num_query_groups=groups,
        head_dim=head_dim,
        vocab_size=vocabulary,
        rotary_base=theta,
        rope_scaling=factor is not None,
        rope_scaling_factor=factor or 8.0,
        norm_epsilon=epsilon,
        tie_embeddings=tied,
    )
    again = model_from_hf(json.loads(json.dumps(hf_from_model(model))))
    free = {"vocab_multiple": model.vocab_multiple, "head_dim": again.head_dim}
    assert again.kv_channels == model.kv_channels
    assert dataclasses.replace(again, **free) == dataclasses.replace(model, **free)
    check_same_model(model, again, Path())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "qwen3"}, r"model_type 'qwen3' \(required: 'llama'\)"),
        ({"model_type": None}, "got no model_type;"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' \(required: 'silu'\)"),
        ({"attention_bias": True}, r"attention_bias True \(required: False\)"),
        ({"mlp_bias": True}, r"mlp_bias True \(required: False\)"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4}"),
        ({"hidden_size": None}, "got no hidden_size;"),
        ({"num_hidden_layers": "two"}, r"num_hidden_layers 'two' \(required: a whole number\)"),
        ({"num_key_value_heads": [2]}, r"num_key_value_heads \[2\] \(required: a whole number\)"),
        ({"rope_theta": 10000.5}, "rope_theta 10000.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "rope low_freq_factor 2.0"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 8.0}}, "rope high_freq_factor 8.0"),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096}},
            r"rope original_max_position_embeddings 4096 \(required: 8192\)",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope factor None"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, r"got rope factor None \(required: a num"),
        ({"rope_scaling": {**LLAMA3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=f"a Llama without biases.*{text}"):
        model_from_hf(hf_config(**changes))


def test_every_reason_is_in_one_error() -> None:
    with pytest.raises(RecipeError, match=r"hidden_act 'relu'.*mlp_bias True.*rope type 'yarn'"):
        model_from_hf(
            hf_config(hidden_act="relu", mlp_bias=True, rope_scaling={"rope_type": "yarn"})
        )


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("num_layers", 15, "model.num_layers 15 (there: 16)"),
        ("head_dim", 128, "model.head_dim 128 (there: 64)"),
        ("num_query_groups", 4, "model.num_query_groups 4 (there: 8)"),
        ("rotary_base", 10000, "model.rotary_base 10000 (there: 500000)"),
        ("rope_scaling", False, "model.rope_scaling False (there: True)"),
        ("rope_scaling_factor", 8.0, "model.rope_scaling_factor 8.0 (there: 32.0)"),
        ("norm_epsilon", 1e-6, "model.norm_epsilon 1e-06 (there: 1e-05)"),
        ("tie_embeddings", False, "model.tie_embeddings False (there: True)"),
    ],
)
def test_another_model_in_the_recipe_is_refused(field: str, value: Any, named: str) -> None:
    with pytest.raises(RecipeError) as error:
        check_same_model(dataclasses.replace(OURS, **{field: value}), OURS, Path("llama"))
    assert str(error.value) == (
        f"the recipe's model must be that of llama, got {named}; take the section that "
        f"--print-recipe prints"
    )


def test_what_does_not_change_the_function_is_free() -> None:
    free = dataclasses.replace(OURS, vocab_multiple=256, init_std=0.1, head_dim=64)
    check_same_model(free, OURS, Path())
    unscaled = dataclasses.replace(OURS, rope_scaling=False)
    other_factor = dataclasses.replace(unscaled, rope_scaling_factor=8.0)
    check_same_model(unscaled, other_factor, Path())


def test_a_folder_needs_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"needs config\.json, got none in"):
        read_hf_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RecipeError, match=r"config\.json must be JSON, got"):
        read_hf_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(RecipeError, match=r"config\.json must be a JSON object, got \[1\];"):
        read_hf_model(tmp_path)
