"""Every tensor of a HuggingFace Llama is one part of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.weights.hf_weights import (
    TABLE,
    check_tensors,
    clear_padding,
    hf_shape,
    hf_views,
)
from tests.training import tiny_hf
from tests.training.our_weights import model_and_weights

HEADS = {
    "groups": st.integers(1, 3),
    "per_group": st.integers(1, 3),
    "head_dim": st.sampled_from([2, 4]),
    "tied": st.booleans(),
}


@settings(deadline=None)
@given(**HEADS)
def test_theirs_are_all_of_ours_once_but_the_padding(
    groups: int, per_group: int, head_dim: int, tied: bool
) -> None:
    model, ours = model_and_weights(groups, per_group, head_dim, tied)
    numbers = torch.cat([v.flatten() for v in hf_views(ours, model).values()])
    clear_padding(ours, model)
    kept = torch.cat([w.flatten() for w in ours.values()])
    assert torch.equal(numbers.sort().values, kept[kept > 0].sort().values)
    assert int((kept == 0).sum()) == 5 * 6 * (1 if tied else 2)


@settings(deadline=None)
@given(**HEADS)
def test_names_and_shapes_are_those_of_a_published_llama(
    groups: int, per_group: int, head_dim: int, tied: bool
) -> None:
    model, ours = model_and_weights(groups, per_group, head_dim, tied)
    c = tiny_hf.hf_config(
        hidden_size=6,
        intermediate_size=5,
        num_attention_heads=groups * per_group,
        num_key_value_heads=groups,
        head_dim=head_dim,
        vocab_size=11,
        tie_word_embeddings=tied,
    )
    found = {name: hf_shape(view) for name, view in hf_views(ours, model).items()}
    assert found == tiny_hf.shapes(c)


def test_heads_of_a_group_stand_together_in_ours() -> None:
    model, ours = model_and_weights(groups=2, per_group=3, head_dim=4, tied=True)
    theirs = hf_views(ours, model)
    qkv = ours["decoder.layers.1.self_attention.linear_qkv.weight"]
    blocks = list(qkv.split(4))  # one head each: q0 q1 q2 k0 v0, q3 q4 q5 k1 v1
    for part, order in [("q", [0, 1, 2, 5, 6, 7]), ("k", [3, 8]), ("v", [4, 9])]:
        view = theirs[f"model.layers.1.self_attn.{part}_proj.weight"]
        assert torch.equal(view.reshape(hf_shape(view)), torch.cat([blocks[i] for i in order]))


def test_gate_is_over_up() -> None:
    model, ours = model_and_weights(1, 1, 2, tied=True)
    fc1 = ours["decoder.layers.0.mlp.linear_fc1.weight"]
    theirs = hf_views(ours, model)
    assert torch.equal(theirs["model.layers.0.mlp.gate_proj.weight"], fc1[:5])
    assert torch.equal(theirs["model.layers.0.mlp.up_proj.weight"], fc1[5:])


def test_layer_numbers_of_two_digits_and_unknown_parameters() -> None:
    model, ours = model_and_weights(1, 1, 2, tied=True, layers=12)
    assert "model.layers.11.mlp.up_proj.weight" in hf_views(ours, model)
    ours["decoder.layers.0.self_attention.linear_qkv.bias"] = torch.zeros(6)
    with pytest.raises(AssertionError, match=r"without a counterpart: .*linear_qkv\.bias"):
        hf_views(ours, model)


def test_the_page_has_the_whole_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trainer/weights.md").read_text()
    for ours, parts in TABLE.items():
        rows = [row for row in page.splitlines() if f"| `{ours}` |" in row]
        assert len(rows) == 1 and all(f"`{theirs}`" in rows[0] for theirs in parts), ours


def test_tensors_that_do_not_fit_are_named() -> None:
    wanted = tiny_hf.shapes(tiny_hf.hf_config())
    check_tensors(wanted, wanted)
    derived = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (8,) for i in (0, 10)}
    check_tensors({**wanted, **derived}, wanted)
    found = {k: v for k, v in wanted.items() if k != "model.norm.weight"}
    found["model.layers.0.self_attn.q_norm.weight"] = (16,)
    found["model.layers.0.self_attn.q_proj.bias"] = (64,)
    found["lm_head.weight"] = (256, 32)
    with pytest.raises(RecipeError) as error:
        check_tensors(found, wanted)
    assert str(error.value) == (
        "the tensors must be those that config.json describes, got missing: model.norm.weight; "
        "without a counterpart: model.layers.0.self_attn.q_norm.weight, "
        "model.layers.0.self_attn.q_proj.bias; of another shape: lm_head.weight [256, 32] "
        "(required: [257, 32]); download the folder again, or convert another model"
    )
    with pytest.raises(RecipeError, match=r"missing: (\S+, ){5}\S+ and 15 more; down"):
        check_tensors({}, wanted)
