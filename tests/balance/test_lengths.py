"""Document lengths from the index are the boundaries that Megatron's data sets hand out."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import megatron_magi.launcher  # noqa: F401  prepares megatron before it is imported
from megatron_magi.balance import document_lengths
from megatron_magi.launcher.cpu import skip_compilation_of_wheels
from tests.data_files import write_documents

skip_compilation_of_wheels()
gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
if "inter_document_masking" not in {f.name for f in dataclasses.fields(gpt.GPTDatasetConfig)}:
    pytest.skip("this megatron-core hands out no boundaries", allow_module_level=True)

LENGTH = 64
SIZES = (70, 20, 10)


class Tokenizer:
    vocab_size, eod, pad = 128, 127, 126

    def __init__(self) -> None:
        self.unique_identifiers = OrderedDict(name="numbers")


def write(prefix: Path, seed: int) -> str:
    """Documents of 1 to 9 and of 60 to 200 tokens; some of them fill samples exactly."""
    rng = np.random.default_rng(seed)
    return write_documents(prefix, [
        LENGTH if not number % 7 else int(rng.integers(*((60, 200), (1, 10))[number % 2]))
        for number in range(120)
    ])  # fmt: skip


def build(folder: Path, paths: list[str], per_split: bool = False, **more: Any) -> list[Any]:
    """Data sets of training, validation and test, split from the files or of one file each."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    blend = paths, None if len(paths) == 1 else [0.3, 0.7]
    of_files: dict[str, Any] = {"blend": blend, "split": "70,20,10"}
    if per_split:
        of_files = {"blend_per_split": [(paths, None)] * 3}
    config = gpt.GPTDatasetConfig(
        random_seed=7,
        sequence_length=LENGTH,
        **of_files,
        path_to_cache=str(folder / "cache"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        inter_document_masking=True,
        **more,
    )
    return BlendedMegatronDatasetBuilder(gpt.GPTDataset, SIZES, lambda: True, config).build()


def handed_out(dataset: Any, number: int) -> list[int]:
    bounds = dataset[number]["cu_seqlens"]
    return bounds.diff()[bounds.diff() > 0].tolist()


@pytest.mark.parametrize("sources", [1, 2], ids=["one file", "a blend"])
@pytest.mark.parametrize(
    "more",
    [{}, {"add_extra_token_to_sequence": False}, {"drop_last_partial_validation_sequence": False}],
    ids=["usual", "no extra token", "a padded end"],
)
def test_lengths_are_those_of_the_loader(
    sources: int, more: dict[str, Any], tmp_path: Path
) -> None:
    paths = [write(tmp_path / f"part{i}", i) for i in range(sources)]
    built = build(tmp_path, paths, **more)
    compared = 0
    for dataset in built:
        for number in range(len(dataset)):
            found = document_lengths(dataset, number)
            assert found.dtype == np.int64 and found.tolist() == handed_out(dataset, number)
            compared += 1
    assert compared >= sum(SIZES)


def test_an_index_that_is_opened_late(tmp_path: Path) -> None:
    paths = [write(tmp_path / "part", 0)]
    known = build(tmp_path, paths, per_split=True)[0]
    wanted = [handed_out(known, number) for number in range(5)]
    more = {"defer_npy_index_mmap": True, "fast_cache_load": True}
    late = build(tmp_path, paths, per_split=True, **more)[0]
    assert late.sample_index is None
    assert [document_lengths(late, number).tolist() for number in range(5)] == wanted


class Conversations:
    """What an SFTDataset has; a character is two tokens."""

    def __init__(self, packs: list[list[int]]) -> None:
        tokenizer = SimpleNamespace(tokenize_conversation=self._tokenize)
        self.config = SimpleNamespace(sequence_length=100, tokenizer=tokenizer)
        self.indices = np.arange(len(packs))
        self.dataset = [[{"content": "x" * n} for n in pack] for pack in packs]

    @staticmethod
    def _tokenize(conversation: Any, **unused: Any) -> tuple[Any, Any]:
        tokens = np.zeros(2 * sum(len(message["content"]) for message in conversation))
        return tokens, tokens

    def _split_conversations(self, messages: Any) -> Any:
        return [[message] for message in messages]


def test_conversations_are_estimated_by_their_characters() -> None:
    packs = Conversations([[10, 20], [10, 30, 40], [100]])
    found = [document_lengths(packs, number).tolist() for number in range(4)]
    assert found == [[20, 80], [20, 60, 20], [100], [20, 80]]


def test_a_message_that_only_calls_a_tool_has_no_characters() -> None:
    packs = Conversations([[10, 20]])
    packs.dataset[0][1:1] = [{"content": None}, {"role": "tool"}]
    packs.config.tokenizer.tokenize_conversation = lambda *given, **unused: (np.zeros(15), None)
    assert document_lengths(packs, 0).tolist() == [20, 80]


def test_another_data_set_is_refused() -> None:
    with pytest.raises(TypeError, match="an SFTDataset, got list; leave --magi-balance-step out"):
        document_lengths([1, 2], 0)
