"""Every tensor of a HuggingFace Llama is one part of ours, read from files one by one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.training.recipe.config import ModelConfig
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.weights.hf_folder import (
    HfTensor,
    common_dtype,
    list_tensors,
    read_tensors,
    split_by_size,
    write_tensors,
)
from megatron_magi.training.weights.hf_weights import (
    TABLE,
    check_tensors,
    clear_padding,
    hf_shape,
    hf_views,
)
from tests.training import tiny_hf


def model_and_weights(
    groups: int, per_group: int, head_dim: int, tied: bool, layers: int = 2
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """A model and weights of ours in which every number is another one."""
    model = ModelConfig(
        num_layers=layers,
        hidden_size=6,
        ffn_hidden_size=5,
        num_attention_heads=groups * per_group,
        num_query_groups=groups,
        head_dim=head_dim,
        vocab_size=11,
        vocab_multiple=8,
        tie_embeddings=tied,
    )
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (16, 6)}
    for layer in range(layers):
        shapes |= {
            f"decoder.layers.{layer}.{name}.weight": shape
            for name, shape in [
                ("input_layernorm", (6,)),
                ("self_attention.linear_qkv", (groups * (per_group + 2) * head_dim, 6)),
                ("self_attention.linear_proj", (6, groups * per_group * head_dim)),
                ("pre_mlp_layernorm", (6,)),
                ("mlp.linear_fc1", (10, 6)),
                ("mlp.linear_fc2", (6, 5)),
            ]
        }
    shapes["decoder.final_layernorm.weight"] = (6,)
    if not tied:
        shapes["output_layer.weight"] = (16, 6)
    ours, begin = {}, 1
    for name, shape in shapes.items():
        size = int(torch.tensor(shape).prod())
        ours[name] = torch.arange(begin, begin + size, dtype=torch.float64).view(shape)
        begin += size
    return model, ours


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
    page = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
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


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 12))
def test_files_are_full_but_not_too_full(sizes: list[int], limit: int) -> None:
    named = {str(i): size for i, size in enumerate(sizes)}
    groups = split_by_size(named, limit)
    assert [name for group in groups for name in group] == list(named)
    totals = [sum(named[name] for name in group) for group in groups]
    assert all(t <= limit or len(g) == 1 for t, g in zip(totals, groups, strict=True))
    for total, following in zip(totals, groups[1:], strict=False):
        assert total + named[following[0]] > limit


@pytest.mark.parametrize(
    ("dtypes", "text"),
    [
        (["BF16", "F32"], "one dtype of BF16, F16, F32, got BF16 (t0), F32 (t1)"),
        (["I8", "I8"], "got I8 (t1)"),
        ([], "got no tensor"),
    ],
)
def test_one_dtype_is_required(dtypes: list[str], text: str) -> None:
    tensors = {f"t{i}": HfTensor(Path(), (1,), dtype) for i, dtype in enumerate(dtypes)}
    with pytest.raises(RecipeError) as error:
        common_dtype(tensors)
    assert text in str(error.value)


# Files, which need the safetensors package


@pytest.fixture
def safetensors() -> None:
    pytest.importorskip("safetensors", reason="reads and writes its files")


@pytest.mark.parametrize("limit", [1, 2000, 10**9])
def test_what_is_written_is_read(safetensors: None, tmp_path: Path, limit: int) -> None:
    model, ours = model_and_weights(2, 2, 4, tied=False)
    views = {n: v.float() for n, v in hf_views(ours, model).items()}
    files = write_tensors(tmp_path, views, limit)
    tensors = list_tensors(tmp_path)
    assert set(files) == {t.file for t in tensors.values()} and tensors.keys() == views.keys()
    assert {1: len(views), 2000: 2, 10**9: 1}[limit] == len(files)
    assert common_dtype(tensors) is torch.float32
    read = dict(read_tensors(tensors))
    assert all(torch.equal(read[n], v.reshape(hf_shape(v))) for n, v in views.items())
    assert all(tensors[n].shape == hf_shape(v) for n, v in views.items())


def test_absent_files_are_named(safetensors: None, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"got no model\.safetensors in"):
        list_tensors(tmp_path)
    c = tiny_hf.hf_config()
    folder = tiny_hf.write_folder(
        tmp_path / "hf", c, tiny_hf.random_tensors(c, torch.float32), files=3
    )
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(RecipeError, match=r"got no model-00002-of-00003\.safetensors in"):
        list_tensors(folder)


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}']
)
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(RecipeError, match=r"index\.json must be JSON with a weight_map, got"):
        list_tensors(tmp_path)


def test_a_broken_file_is_named(safetensors: None, tmp_path: Path) -> None:
    c = tiny_hf.hf_config()
    folder = tiny_hf.write_folder(tmp_path / "hf", c, tiny_hf.random_tensors(c, torch.float32))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RecipeError, match=r"model\.safetensors must be a whole safetensors file"):
        list_tensors(folder)


def test_an_index_beside_other_files_rules(safetensors: None, tmp_path: Path) -> None:
    c = tiny_hf.hf_config()
    tensors = tiny_hf.random_tensors(c, torch.float32)
    folder = tiny_hf.write_folder(tmp_path / "hf", c, tensors, files=2)
    other: Any = sys.modules["safetensors.torch"]
    other.save_file({"tok_embeddings.weight": torch.ones(1)}, folder / "model.safetensors")
    assert list_tensors(folder).keys() == tensors.keys()
    index = folder / "model.safetensors.index.json"
    assert json.loads(index.read_text())["weight_map"].keys() == tensors.keys()


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_text("")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(RecipeError, match=r"pip install 'megatron-magi\[weights\]'"):
        list_tensors(tmp_path)
