"""Packed documents: ids, one EOD each, and both files or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from megatron_magi.text.documents import Document
from megatron_magi.text.pack import pack
from megatron_magi.text.tokenizers import ByteTokenizer

pytest.importorskip("megatron_magi.adapter", reason="needs megatron-core")
DOCUMENTS = [Document(f"d{i}", b"x" * n) for i, n in enumerate((5, 40, 1, 17))]


class WideTokenizer(ByteTokenizer):
    """A byte b is 100,000 + b, which 16 bits cannot hold; "eod" gives the EOD."""

    vocab_size = 128_256
    eod = 128_001

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        return np.array([self.eod]) if text == b"eod" else super().encode(text) + 100_000


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), WideTokenizer()])
def test_megatron_reads_every_document_with_its_eod(
    tmp_path: Path, tokenizer: ByteTokenizer
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    assert pack(DOCUMENTS, tmp_path / "deep" / "c", tokenizer) == [6, 41, 2, 18]
    data = IndexedDataset(str(tmp_path / "deep" / "c"))
    expected = [[*tokenizer.encode(d.text).tolist(), tokenizer.eod] for d in DOCUMENTS]
    assert [data[i].tolist() for i in range(len(data))] == expected
    assert data.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert sorted(contents(tmp_path / "deep")) == ["c.bin", "c.idx"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("full")])
def test_a_failure_leaves_the_old_corpus(tmp_path: Path, error: BaseException) -> None:
    pack(DOCUMENTS, tmp_path / "c", ByteTokenizer())
    before = contents(tmp_path)

    def broken() -> Iterator[Document]:
        yield from DOCUMENTS
        raise error

    with pytest.raises(type(error)):
        pack(broken(), tmp_path / "c", ByteTokenizer())
    with pytest.raises(ValueError, match="must have a document, got none"):
        pack([], tmp_path / "c", ByteTokenizer())
    with pytest.raises(ValueError, match=r"EOD's id 128001, got it from odd with the tokenizer"):
        pack([*DOCUMENTS, Document("odd", b"eod")], tmp_path / "c", WideTokenizer())
    assert contents(tmp_path) == before


@pytest.mark.parametrize("folder", ["", ".", "..", "out/.."])
def test_a_prefix_has_a_name(folder: str) -> None:
    with pytest.raises(ValueError, match="must have the prefix of its files, got the folder"):
        pack(DOCUMENTS, Path(folder), ByteTokenizer())
