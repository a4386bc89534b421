"""Tokenizers: ids that are known, special tokens that stay text, and clear refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.text.tokenizers import ByteTokenizer, load_tokenizer

WITH_QUICKTOK = "the package quicktok-v1 carries the vocabulary of Llama 3"
SPECIAL = ("<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>", "<|reserved_special_token_7|>")


def test_bytes_are_tokens() -> None:
    tokenizer = load_tokenizer("byte")
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode(b"a\xff").tolist() == [97, 255]
    with pytest.raises(ValueError, match=r"for a tokenizer folder only, got '</s>' for byte"):
        load_tokenizer("byte", "</s>")


def test_llama3_gives_the_published_ids() -> None:
    pytest.importorskip("quicktok", reason=WITH_QUICKTOK)
    tokenizer = load_tokenizer("llama3")
    assert (tokenizer.vocab_size, tokenizer.eod) == (128_256, 128_001)
    assert tokenizer.encode(b"Hello world").tolist() == [9906, 1917]
    assert tokenizer.encode(b"").tolist() == []
    assert tokenizer.encode(b"\xff").tolist() == tokenizer.encode("\ufffd".encode()).tolist()


@given(st.lists(st.one_of(st.sampled_from(SPECIAL), st.text(max_size=5)), max_size=6))
def test_llama3_makes_no_special_id_of_text(pieces: list[str]) -> None:
    quicktok = pytest.importorskip("quicktok", reason=WITH_QUICKTOK)
    text = "".join(pieces)
    ids = load_tokenizer("llama3").encode(text.encode())
    assert (ids < 128_000).all()
    assert quicktok.get_encoding("llama3").decode(ids.tolist()) == text


def test_a_name_that_is_no_folder_is_refused() -> None:
    with pytest.raises(ValueError, match=r"byte, llama3 or a folder .* got 'llama', and there is"):
        load_tokenizer("llama")


@pytest.mark.parametrize(
    ("choice", "module", "package"),
    [("llama3", "quicktok", "quicktok-v1"), ("folder", "tokenizers", "tokenizers")],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, choice: str, module: str, package: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"{choice} needs the package {package}, got none; pip"):
        load_tokenizer(choice)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A letter is a token. The file also asks for EOS at the end, truncation and padding."""
    tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer.json")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<eos>", "<eot>"])
    made.add_tokens(["word"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 256)]
    )
    made.enable_truncation(6)
    made.enable_padding(length=20)
    target = tmp_path / "my-model"
    target.mkdir()
    made.save(str(target / "tokenizer.json"))
    return target


def write_json(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def test_a_folder_encodes_text_and_nothing_else(folder: Path) -> None:
    write_json(folder, "tokenizer_config.json", {"eos_token": "<eos>"})
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("my-model", 259, 256)
    ids = tokenizer.encode(b"ab<eos>c<eot> a")
    assert len(ids) == 15  # not cut, not padded, no EOS at its end
    assert (ids < 256).all()
    assert ids[0] == ids[-1]
    assert tokenizer.encode("é\n".encode()).size == 3


@pytest.mark.parametrize(
    ("files", "eod_token", "eod"),
    [
        ({"tokenizer_config.json": {"eos_token": {"content": "<eot>"}}}, None, 257),
        ({"special_tokens_map.json": {"eos_token": "<eot>"}}, None, 257),
        ({"generation_config.json": {"eos_token_id": 257}}, None, 257),
        ({"config.json": {"eos_token_id": 256}}, None, 256),
        ({"tokenizer_config.json": {"eos_token": "<eos>"}}, "<eot>", 257),
        (
            {
                "tokenizer_config.json": {"eos_token": None},
                "special_tokens_map.json": {"eos_token": "<eos>"},
                "config.json": {"eos_token_id": 257},
            },
            None,
            256,
        ),
    ],
    ids=["object", "map", "generation", "config", "chosen", "order"],
)
def test_where_the_eod_comes_from(
    folder: Path, files: dict[str, Any], eod_token: str | None, eod: int
) -> None:
    for name, content in files.items():
        write_json(folder, name, content)
    assert load_tokenizer(str(folder), eod_token).eod == eod


@pytest.mark.parametrize(
    ("files", "eod_token", "says"),
    [
        ({}, None, "got None"),
        ({"config.json": {"eos_token_id": [256, 257]}}, None, r"got \[256, 257\]"),
        ({"config.json": {"eos_token_id": 999}}, None, "got 999"),
        ({}, "<none>", "got '<none>'"),
        ({}, "a", "must be a special token"),
        ({}, "word", "must be a special token"),
        ({"config.json": "text"}, None, "got None"),
    ],
    ids=["nowhere", "several", "no_token", "unknown", "letter", "added_word", "no_object"],
)
def test_an_eod_that_is_none(
    folder: Path, files: dict[str, Any], eod_token: str | None, says: str
) -> None:
    for name, content in files.items():
        write_json(folder, name, content)
    with pytest.raises(ValueError, match=says):
        load_tokenizer(str(folder), eod_token)


def test_files_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be byte, llama3 or a folder .* got .*llama-3"):
        load_tokenizer("llama-3")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json must be JSON"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="one that the package tokenizers reads"):
        load_tokenizer(str(folder))


def test_the_vocabulary_ends_behind_its_largest_id(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer.json")
    model = tokenizers.models.WordLevel({"a": 0, "[end]": 70_000}, unk_token="a")
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["[end]"])
    made.save(str(tmp_path / "tokenizer.json"))
    # A word-level model finds the token of its whole text again, so it is no EOD.
    with pytest.raises(ValueError, match="got token 70000"):
        load_tokenizer(str(tmp_path), "[end]")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Punctuation()
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path), "[end]").vocab_size == 70_001
