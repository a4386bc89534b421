"""Index files are read as Megatron reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_magi.training.data.index_file import IndexFile
from megatron_magi.training.recipe.recipe_error import RecipeError


@pytest.mark.parametrize("vocab_size", [257, 200_000], ids=["uint16", "int32"])
def test_files_are_read_as_megatron_reads_them(tmp_path: Path, vocab_size: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(vocab_size)
    builder = IndexedDatasetBuilder(f"{tmp_path}/d.bin", dtype=dtype)
    rng = np.random.RandomState(3)
    for length in (1, 7, 30):
        builder.add_document(rng.randint(0, vocab_size, length), [length])
    builder.finalize(f"{tmp_path}/d.idx")
    ours, theirs = IndexFile(f"{tmp_path}/d"), IndexedDataset(f"{tmp_path}/d")
    assert len(ours) == len(theirs) == 3
    assert np.array_equal(ours.sequence_lengths, theirs.sequence_lengths)
    for i in range(3):
        assert np.array_equal(ours.get(i), theirs.get(i))
    assert np.array_equal(ours.get(2, 5, 9), theirs.get(2, offset=5, length=9))


def test_another_kind_of_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(b"")
    (tmp_path / "d.idx").write_bytes(b"something else")
    with pytest.raises(RecipeError, match="another kind of file"):
        IndexFile(f"{tmp_path}/d")
