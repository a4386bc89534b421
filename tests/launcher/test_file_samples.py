"""Boundaries of a data file's samples are those of its documents, joined and cut."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_magi.adapter  # noqa: F401  prepares the import of Megatron
from megatron_magi.launcher.file_samples import FileSamples, open_index
from tests.data_files import write_documents

EOD = 9


class Documents:
    """The part of an IndexedDataset that is read; every token but an EOD is its document."""

    def __init__(self, lengths: list[int], eods: dict[int, list[int]] | None = None) -> None:
        self.sequence_lengths = np.array(lengths, dtype=np.int32)
        self.tokens = [np.full(n, 100 + i) for i, n in enumerate(lengths)]
        for document, places in (eods or {}).items():
            self.tokens[document][places] = EOD

    def get(self, document: int, offset: int, length: int) -> Any:
        return self.tokens[document][offset : offset + length]


def stream(file: Documents, seed: int) -> list[np.ndarray]:
    """The documents in the order that the samples have."""
    used = [i for i, n in enumerate(file.sequence_lengths) if n]
    return [file.tokens[i] for i in np.random.RandomState(seed).permutation(used)]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    seq_length=st.integers(1, 50),
    seed=st.integers(0, 5),
)
def test_every_boundary_is_where_the_document_changes(
    lengths: list[int], seq_length: int, seed: int
) -> None:
    file = Documents(lengths)
    if sum(lengths) < seq_length:
        with pytest.raises(ValueError, match=rf"hold a sample of {seq_length} tokens, got "):
            FileSamples(file, seq_length, seed=seed)
        return
    samples = FileSamples(file, seq_length, seed=seed)
    tokens = np.concatenate(stream(file, seed))
    assert len(samples) == len(tokens) // seq_length
    assert sorted(samples.places) == [*range(len(samples))]
    for number, place in enumerate(samples.places):
        own = tokens[place * seq_length : (place + 1) * seq_length]
        want = [0, *(np.flatnonzero(np.diff(own)) + 1), seq_length]
        assert samples.boundaries(number).tolist() == want
    assert (samples.boundaries(len(samples)) == samples.boundaries(0)).all()


def test_tokens_end_documents_inside_a_sequence_of_the_index() -> None:
    samples = FileSamples(Documents([8, 8], {0: [1, 7], 1: [1, 7]}), 12, eod=EOD)
    assert samples.boundaries(0).tolist() == [0, 2, 8, 10, 12]


def test_a_file_of_megatron_is_read(tmp_path: Path) -> None:
    index = open_index(write_documents(tmp_path / "corpus", (5, 0, 7)))
    found = FileSamples(index, 12).boundaries(0).tolist()
    assert found in ([0, 5, 12], [0, 7, 12])


def test_a_prefix_without_files_and_a_damaged_index_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prefix of a .bin and an .idx file, got \S+ without"):
        open_index(f"{tmp_path}/none")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"damaged{suffix}").write_bytes(b"nothing of Megatron's")
    with pytest.raises(ValueError, match="must have Megatron's index, got ") as found:
        open_index(f"{tmp_path}/damaged")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("lengths", [[5, 8], [-1, 7]])
def test_an_index_names_bytes_that_the_file_has(tmp_path: Path, lengths: list[int]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{tmp_path}/corpus.bin", dtype=np.uint16)
    builder.add_document(torch.full((12,), 7), [5, 7])
    builder.sequence_lengths = lengths
    builder.finalize(f"{tmp_path}/corpus.idx")
    with pytest.raises(ValueError, match=r"got 24 in \S+corpus.bin; write both again"):
        open_index(f"{tmp_path}/corpus")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_what_is_left_of_a_damaged_file_ends_without_an_error(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"damaged{suffix}").write_bytes(b"nothing of Megatron's")
    with pytest.raises(ValueError, match="must have Megatron's index, got ") as found:
        open_index(f"{tmp_path}/damaged")
    del found
    gc.collect()


@pytest.mark.parametrize("seq_length", [0, -5])
def test_a_sample_has_a_token(seq_length: int) -> None:
    with pytest.raises(ValueError, match=f"--seq-length must be at least 1, got {seq_length}"):
        FileSamples(None, seq_length)
