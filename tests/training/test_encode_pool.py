"""Documents become ids in a pool of processes: the same for any number, and no hang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.training.data import corpus
from megatron_magi.training.data.corpus import ByteTokenizer, Document, pack
from megatron_magi.training.data.index_file import IndexFile
from megatron_magi.training.recipe.recipe_error import RecipeError
from tests.training.odd_tokenizers import MoodyTokenizer
from tests.training.small_corpus import DOCUMENTS, contents


@pytest.mark.usefixtures("small_batches")
def test_any_number_of_processes_gives_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [b"slow first", *(bytes([65 + i]) * (1 + 37 * i % 150) for i in range(50))]
    documents = [Document(f"d{i}", text) for i, text in enumerate(texts)]
    pools = []
    start = corpus._in_pool
    monkeypatch.setattr(corpus, "_in_pool", lambda *a: pools.append(a[-1]) or start(*a))
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        pack(iter(documents), folder / "c", MoodyTokenizer(), workers)
        assert contents(folder) == contents(tmp_path / "1")
        index = IndexFile(f"{folder}/c")
        assert [bytes((index.get(i)[:-1] - 100_000).tolist()) for i in range(len(index))] == texts
    assert pools == [2, 3]


@pytest.mark.usefixtures("small_batches")
def test_documents_are_read_no_further_ahead_than_the_pool_needs(tmp_path: Path) -> None:
    taken = 0

    def documents() -> Iterator[Document]:
        nonlocal taken
        for i in range(200):
            taken += 1
            yield Document(f"d{i}", b"x" * 64)

    batches = corpus.encode_documents(documents(), ByteTokenizer(), np.uint16, 2)
    next(batches)
    batches.close()
    assert taken <= 8


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_that_gives_the_eod_is_named(tmp_path: Path, workers: int) -> None:
    documents = [*DOCUMENTS, Document("culprit", b"eod")]
    with pytest.raises(RecipeError, match=r"EOD's id 128001, got it from culprit"):
        pack(documents, tmp_path / "c", MoodyTokenizer(), workers)
    assert contents(tmp_path) == {}


@pytest.mark.usefixtures("small_batches")
def test_a_process_that_dies_is_an_error_and_no_hang(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="one of 2 that died"):
        pack([*DOCUMENTS, Document("d", b"die")], tmp_path / "c", MoodyTokenizer(), 2)
    assert contents(tmp_path) == {}


@pytest.mark.usefixtures("small_batches")
def test_a_batch_has_so_many_bytes_or_one_longer_document() -> None:
    texts = [b"x" * n for n in (30, 34, 1, 200, 64, 3)]
    documents = [Document(f"d{i}", text) for i, text in enumerate(texts)]
    batches = list(corpus.encode_documents(documents, ByteTokenizer(), np.uint16, 1))
    assert [batch.names for batch in batches] == [("d0", "d1"), ("d2",), ("d3",), ("d4",), ("d5",)]
    assert batches[0].lengths == (31, 35) and batches[0].ids.dtype == np.uint16
    assert batches[0].ids.tolist() == [120] * 30 + [256] + [120] * 34 + [256]


def test_little_text_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a pool was started")

    monkeypatch.setattr(corpus, "_in_pool", started)
    batches = corpus.encode_documents(DOCUMENTS, ByteTokenizer(), np.uint16, 4)
    assert [batch.names for batch in batches] == [tuple(d.name for d in DOCUMENTS)]
