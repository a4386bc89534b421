"""Data files that are shorter than their index says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_magi.config import MagiConfig
from megatron_magi.launcher.data_files import wrap_open_data_file
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
