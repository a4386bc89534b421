"""Packing: what the files hold, and all of them or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_magi.training.data.corpus import ByteTokenizer, Document, pack, packed_sha256
from megatron_magi.training.data.index_file import IndexFile
from megatron_magi.training.recipe.recipe_error import RecipeError
from tests.training.odd_tokenizers import WideTokenizer
from tests.training.small_corpus import DOCUMENTS, contents

SUFFIXES = ("bin", "documents", "idx", "json")


def test_a_large_vocabulary_keeps_its_ids(tmp_path: Path) -> None:
    pack(DOCUMENTS, tmp_path / "c", WideTokenizer())
    assert (tmp_path / "c.bin").stat().st_size == 4 * 264
    assert IndexFile(f"{tmp_path}/c").get(0).tolist() == [100_120] * 5 + [128_001]


def test_names_stay_on_their_lines(tmp_path: Path) -> None:
    names = ["a\nb.py", "c\u2028d", "bad\udce9name", "plain"]
    pack([Document(n, b"x") for n in names], tmp_path / "c", ByteTokenizer())
    lines = (tmp_path / "c.documents").read_text(encoding="utf-8").splitlines()
    assert lines == ["a b.py", "c d", "bad\\udce9name", "plain"]


def test_the_checksum_is_read_where_pack_has_written_one(tmp_path: Path) -> None:
    stats = pack(DOCUMENTS, tmp_path / "c", ByteTokenizer())
    assert packed_sha256(tmp_path / "c") == packed_sha256(f"{tmp_path}/c") == stats.sha256
    assert packed_sha256(tmp_path / "nothing") is None
    for odd in ("[", "[1]", "{}", '{"sha256": 5}'):
        (tmp_path / "c.json").write_text(odd)
        assert packed_sha256(tmp_path / "c") is None


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


def test_a_folder_in_the_way_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "c.idx").mkdir()
    with pytest.raises(RecipeError, match=r"must not be a folder, got .*c\.idx"):
        pack(iter(()), tmp_path / "c", ByteTokenizer())
    assert [p.name for p in tmp_path.iterdir()] == ["c.idx"]
