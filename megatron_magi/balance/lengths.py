"""Document lengths of a sample of Megatron's data sets, from their index: no token is read.

An estimate costs time and never a sample, because any dealing of a step trains the same samples.
Lengths are estimates for documents that end inside a document of the data file
(`--reset-attention-mask` without `--append-eod`), for fill-in-the-middle, and for conversations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from megatron_magi.balance.deal import Int64Array

Messages = Sequence[Mapping[str, Any]]

NUM_TOKENISED = 4
"""Packs of conversations that tell how many tokens a character has."""

_rates: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
"""Tokens and characters of the first packs, by data set of conversations."""


def document_lengths(dataset: Any, number: int) -> Int64Array:
    """int64 [documents]: tokens of each document of a sample, the padding with the last one.

    Args:
        dataset: A GPTDataset, a BlendedDataset of them, or an SFTDataset.
        number: Of the sample, as a sampler yields it.

    Raises:
        TypeError: another data set.

    Cost: reads the index; for conversations a row of the data is read.
    """
    while hasattr(dataset, "datasets"):
        if dataset.dataset_index is None:  # --dataloader-defer-npy-index-mmap
            dataset[0]
        source = int(dataset.dataset_index[number])
        number = int(dataset.dataset_sample_index[number])
        dataset = dataset.datasets[source]
    if hasattr(dataset, "sample_index"):
        return _of_index(dataset, number)
    if hasattr(dataset, "_split_conversations"):
        return _of_conversations(dataset, number)
    raise TypeError(
        f"document lengths require a GPTDataset, a BlendedDataset or an SFTDataset, got "
        f"{type(dataset).__name__}; leave --magi-balance-step out"
    )


def _of_index(dataset: Any, number: int) -> Int64Array:
    if dataset.sample_index is None:  # --dataloader-defer-npy-index-mmap
        dataset[0]
    row = int(dataset.shuffle_index[number])
    (first, start), (last, end) = (map(int, dataset.sample_index[row + i]) for i in (0, 1))
    documents = np.asarray(dataset.document_index[first : last + 1])
    lengths = np.asarray(dataset.dataset.sequence_lengths[documents]).astype(np.int64)
    lengths[-1] = end
    lengths[0] -= start  # the last one too, if the sample has one document
    return _with_padding(lengths, dataset.config.sequence_length)


def _of_conversations(dataset: Any, number: int) -> Int64Array:
    """Estimated by characters, and cut where the data set cuts."""
    tokens, characters = _tokens_of_characters(dataset)
    counted = np.array([_characters(c) for c in _conversations(dataset, number)], np.int64)
    length = dataset.config.sequence_length
    ends = np.minimum(np.cumsum(counted * tokens // characters), length)
    return _with_padding(np.diff(ends, prepend=0), length)


def _with_padding(lengths: Int64Array, total: int) -> Int64Array:
    """Documents that are not empty, the last one continued to the end of the sample."""
    lengths = lengths[lengths > 0]
    padding = total - int(lengths.sum())
    if not len(lengths):
        return np.array([total], np.int64)
    if padding > 0:
        lengths[-1] += padding
    return lengths


def _tokens_of_characters(dataset: Any) -> tuple[int, int]:
    if dataset not in _rates:
        tokens = characters = 0
        for number in range(min(NUM_TOKENISED, len(dataset.indices))):
            for conversation in _conversations(dataset, number):
                tokens += len(
                    dataset.config.tokenizer.tokenize_conversation(
                        conversation, return_target=True, add_generation_prompt=False
                    )[0]
                )
                characters += _characters(conversation)
        _rates[dataset] = (tokens, characters) if tokens and characters else (1, 1)
    return _rates[dataset]


def _conversations(dataset: Any, number: int) -> list[Messages]:
    row = int(dataset.indices[number % len(dataset.indices)])
    found: list[Messages] = dataset._split_conversations(dataset.dataset[row])
    return found


def _characters(conversation: Messages) -> int:
    """Of all messages; one that only calls a tool has no content."""
    contents = (message.get("content") for message in conversation)
    return sum(len(content) for content in contents if content is not None)
