"""Data files that are cut short, or leave nothing to a share."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from megatron_magi.config import MagiConfig
from megatron_magi.launcher.data_files import wrap_count_epochs, wrap_open_data_file
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.session import LauncherState


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.uint16)
    for length in (5, 0, 9):
        builder.add_document(np.arange(length), [length])
    builder.finalize(str(tmp_path / "corpus.idx"))
    return tmp_path / "corpus"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> type[IndexedDataset]:
    wrapped: Any = wrap_open_data_file(
        IndexedDataset.__init__, LauncherState(LauncherOptions(MagiConfig()))
    )
    monkeypatch.setattr(IndexedDataset, "__init__", wrapped)
    return IndexedDataset


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_was_cut_short_is_named(
    corpus: Path, opened: type[IndexedDataset], mmap: bool
) -> None:
    assert len(opened(str(corpus), mmap=mmap)) == 3
    tokens = corpus.with_suffix(".bin")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"corpus\.bin must hold the 28 bytes .* got 27 bytes"):
        opened(str(corpus), mmap=mmap)


@pytest.mark.parametrize("num_samples, fails", [(0, True), (None, False)])
def test_a_share_without_a_document_is_an_error(num_samples: int | None, fails: bool) -> None:
    """Megatron counts epochs without an end; it asks for one token even if no sample is wanted."""
    made: Any = GPTDataset.__new__(GPTDataset)
    made.dataset_path, made.index_split, made.num_samples = "corpus", Split.valid, num_samples
    made.config = SimpleNamespace(sequence_length=8, add_extra_token_to_sequence=True)
    launch = LauncherState(LauncherOptions(MagiConfig()))
    wrapped: Any = wrap_count_epochs(GPTDataset._get_num_epochs, launch)
    count = functools.partial(wrapped, made)
    assert count(9) == 1
    if fails:
        with pytest.raises(ValueError, match="leave a document of corpus for valid, got none"):
            count(0)
    else:
        assert count(0) == 1
