"""The files of a HuggingFace folder: what is written is read, and what is not whole is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.weights.hf_folder import (
    HfTensor,
    common_dtype,
    list_tensors,
    read_tensors,
    split_by_size,
    write_tensors,
)
from megatron_magi.training.weights.hf_weights import hf_shape, hf_views
from tests.training import tiny_hf
from tests.training.our_weights import model_and_weights


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
