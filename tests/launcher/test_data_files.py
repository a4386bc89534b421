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
def launch() -> LauncherState:
    return LauncherState(LauncherOptions(MagiConfig()))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, launch: LauncherState) -> type[IndexedDataset]:
    wrapped: Any = wrap_open_data_file(IndexedDataset.__init__, launch)
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


def test_a_share_without_a_document_is_an_error(
    corpus: Path, opened: type[IndexedDataset], launch: LauncherState
) -> None:
    """Megatron looks for samples of it without an end."""
    launch.shares = [(0.0, 0.6), (0.6, 1.0), None]
    assert len(opened(str(corpus))) == 3
    launch.shares = [(0.0, 0.99), (0.99, 1.0), None]
    with pytest.raises(ValueError, match=r"a document for validation, got none of the 3 .*corpus;"):
        opened(str(corpus))
