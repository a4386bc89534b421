"""Packing: the same bytes from any number of processes, statistics, and all files or none."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.training.data import encode_pool
from megatron_magi.training.data.corpus import ByteTokenizer, Document, pack
from megatron_magi.training.data.index_file import IndexFile
from megatron_magi.training.process.whole_files import written_whole
from megatron_magi.training.recipe.recipe_error import RecipeError
from tests.training.odd_tokenizers import MoodyTokenizer, WideTokenizer

LENGTHS = (5, 40, 1, 17, 64, 3, 90, 2, 33)
DOCUMENTS = [Document(f"d{i}", b"x" * n) for i, n in enumerate(LENGTHS)]
SUFFIXES = ("bin", "documents", "idx", "json")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool for a few bytes."""
    monkeypatch.setattr(encode_pool, "BATCH_BYTES", 64)
    monkeypatch.setattr(encode_pool, "POOL_FROM_BATCHES", 2)


def test_stats_count_what_was_packed(tmp_path: Path) -> None:
    stats = pack(DOCUMENTS, tmp_path / "c", ByteTokenizer())
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["num_documents"] == stats.num_documents == len(LENGTHS)
    assert written["num_tokens"] == sum(LENGTHS) + len(LENGTHS)
    assert written["length_percentiles"] == {"p50": 18, "p90": 65, "p99": 91, "max": 91}
    assert written["length_histogram"] == {"<=50": 7, "<=100": 2}
    assert "9 documents, 264 tokens" in stats.table()


def test_a_large_vocabulary_keeps_its_ids(tmp_path: Path) -> None:
    pack(DOCUMENTS, tmp_path / "c", WideTokenizer())
    assert (tmp_path / "c.bin").stat().st_size == 4 * 264
    assert IndexFile(f"{tmp_path}/c").get(0).tolist() == [100_120] * 5 + [128_001]


@pytest.mark.usefixtures("small_batches")
def test_any_number_of_processes_gives_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [b"slow first", *(bytes([65 + i]) * (1 + 37 * i % 150) for i in range(50))]
    documents = [Document(f"d{i}", text) for i, text in enumerate(texts)]
    pools = []
    start = encode_pool._in_pool
    monkeypatch.setattr(encode_pool, "_in_pool", lambda *a: pools.append(a[-1]) or start(*a))
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

    batches = encode_pool.encode_documents(documents(), ByteTokenizer(), np.uint16, 2)
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


def test_names_stay_on_their_lines(tmp_path: Path) -> None:
    names = ["a\nb.py", "c\u2028d", "bad\udce9name", "plain"]
    pack([Document(n, b"x") for n in names], tmp_path / "c", ByteTokenizer())
    lines = (tmp_path / "c.documents").read_text(encoding="utf-8").splitlines()
    assert lines == ["a b.py", "c d", "bad\\udce9name", "plain"]


# All files or none.


@pytest.mark.parametrize("error", [RecipeError("damaged"), KeyboardInterrupt(), OSError("full")])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("small_batches")
def test_what_fails_midway_leaves_the_old_corpus(
    tmp_path: Path, error: BaseException, workers: int
) -> None:
    pack(DOCUMENTS, tmp_path / "c", ByteTokenizer())
    before = contents(tmp_path)

    def broken() -> Iterator[Document]:
        yield from DOCUMENTS * 3
        raise error

    with pytest.raises(type(error)):
        pack(broken(), tmp_path / "c", ByteTokenizer(), workers)
    assert contents(tmp_path) == before


def test_nothing_to_pack_leaves_the_old_corpus(tmp_path: Path) -> None:
    pack(DOCUMENTS, tmp_path / "c", ByteTokenizer())
    before = contents(tmp_path)
    with pytest.raises(RecipeError, match="one document or more"):
        pack([], tmp_path / "c", ByteTokenizer())
    assert contents(tmp_path) == before


def test_a_new_corpus_replaces_all_files(tmp_path: Path) -> None:
    pack(DOCUMENTS, tmp_path / "c", ByteTokenizer())
    pack(DOCUMENTS[:2], tmp_path / "c", ByteTokenizer())
    assert sorted(contents(tmp_path)) == [f"c.{suffix}" for suffix in SUFFIXES]
    assert len(IndexFile(f"{tmp_path}/c")) == 2
    assert (tmp_path / "c.documents").read_text() == "d0\nd1\n"


def test_a_signal_waits_until_all_files_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = [tmp_path / "a", tmp_path / "b"]
    rename = Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        if target.name == "a":
            signal.raise_signal(signal.SIGINT)
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), written_whole(targets) as partial:
        for path in partial:
            path.write_text("new")
    assert contents(tmp_path) == {"a": b"new", "b": b"new"}


def test_a_folder_in_the_way_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "c.idx").mkdir()
    with pytest.raises(RecipeError, match=r"must not be a folder, got .*c\.idx"):
        pack(iter(()), tmp_path / "c", ByteTokenizer())
    assert [p.name for p in tmp_path.iterdir()] == ["c.idx"]
