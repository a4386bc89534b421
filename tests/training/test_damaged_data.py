"""Damaged .bin and .idx files: one typed error with path, place and remedy, or the same tokens."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.cli import main
from megatron_magi.training.data.index_file import START
from megatron_magi.training.data.packed_samples import PackedDataset
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_values import DataConfig
from tests.training.small_corpus import ByteTokenizer, Document, pack

EOD, VOCAB = 256, 257
NUM_DOCUMENTS = 60
LENGTHS_AT, OFFSETS_AT = START, START + 4 * NUM_DOCUMENTS
MARKS_AT = OFFSETS_AT + 8 * NUM_DOCUMENTS
Rng = np.random.RandomState
Damage = Callable[[bytearray, Rng], bytearray | None]
"""Changes the content where it lies, or returns another."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Content of whole files by suffix."""
    prefix = tmp_path_factory.mktemp("whole") / "c"
    rng = Rng(0)
    texts = [bytes(97 + rng.randint(0, 8, n).astype(np.uint8)) for n in rng.randint(1, 40, 60)]
    pack((Document(f"d{i}", t) for i, t in enumerate(texts)), prefix, ByteTokenizer())
    return {s: Path(f"{prefix}.{s}").read_bytes() for s in ("bin", "idx")}


def put_number(at: int, form: str) -> Callable[[int], Damage]:
    """Another number at byte `at` of the file."""

    def value(number: int) -> Damage:
        def damage(content: bytearray, rng: Rng) -> None:
            struct.pack_into(form, content, at, number)

        return damage

    return value


def one_of(begin: int, size: int, form: str, change: Callable[[int, Rng], int]) -> Damage:
    """One of the numbers from byte `begin` on, changed."""

    def damage(content: bytearray, rng: Rng) -> None:
        at = begin + size * rng.randint(NUM_DOCUMENTS)
        old = struct.unpack_from(form, content, at)[0]
        struct.pack_into(form, content, at, change(old, rng))

    return damage


def flip(begin: int, end: int | None) -> Damage:
    """One to three other bytes between two places."""

    def damage(content: bytearray, rng: Rng) -> None:
        last = len(content) if end is None else end
        for at in rng.randint(begin, last, rng.randint(1, 4)):
            content[at] ^= rng.randint(1, 256)

    return damage


def fill(value: int) -> Damage:
    """A page that was never written."""

    def damage(content: bytearray, rng: Rng) -> None:
        at = rng.randint(len(content) - 64)
        content[at : at + 64] = bytes([value]) * 64

    return damage


def swap_offsets(content: bytearray, rng: Rng) -> None:
    a, b = (OFFSETS_AT + 8 * i for i in rng.choice(NUM_DOCUMENTS, 2, replace=False))
    content[a : a + 8], content[b : b + 8] = content[b : b + 8], content[a : a + 8]


def beyond(content: bytearray, rng: Rng) -> None:
    at = 2 * rng.randint(len(content) // 2)
    struct.pack_into("<H", content, at, rng.randint(VOCAB, 65536))


version, code, sequences, documents = (
    put_number(9, "<Q"),
    put_number(17, "<B"),
    put_number(18, "<Q"),
    put_number(26, "<Q"),
)
lengths = (LENGTHS_AT, 4, "<i")
offsets = (OFFSETS_AT, 8, "<q")
marks = (MARKS_AT, 8, "<q")
REFUSED: dict[str, tuple[str, Damage]] = {
    "index_empty": ("idx", lambda c, r: bytearray()),
    "index_cut": ("idx", lambda c, r: c[: r.randint(len(c))]),
    "index_longer": ("idx", lambda c, r: c + bytes(r.randint(1, NUM_DOCUMENTS))),
    "index_much_longer": ("idx", lambda c, r: c + bytes(r.randint(NUM_DOCUMENTS + 1, 999))),
    "magic": ("idx", flip(0, 9)),
    "version_99": ("idx", version(99)),
    "version_0": ("idx", version(0)),
    "version_bytes": ("idx", flip(9, 10)),
    **{f"code_{n}": ("idx", code(n)) for n in (0, 1, 2, 4, 5, 6, 7, 9, 255)},
    "no_sequence": ("idx", sequences(0)),
    "many_sequences": ("idx", sequences(2**63)),
    "fewer_sequences": ("idx", lambda c, r: sequences(int(r.randint(NUM_DOCUMENTS)))(c, r)),
    "no_document": ("idx", documents(0)),
    "many_documents": ("idx", documents(2**64 - 1)),
    "more_documents": ("idx", documents(NUM_DOCUMENTS + 2)),
    "length_flipped": ("idx", flip(LENGTHS_AT, LENGTHS_AT + 1)),
    "length_off": ("idx", one_of(*lengths, lambda n, r: n + 1)),
    "length_zero": ("idx", one_of(*lengths, lambda n, r: 0)),
    "length_negative": ("idx", one_of(*lengths, lambda n, r: -n)),
    "length_huge": ("idx", one_of(*lengths, lambda n, r: 2**31 - 1)),
    "offset_off": ("idx", one_of(*offsets, lambda n, r: n + r.randint(1, 9))),
    "offset_negative": ("idx", one_of(*offsets, lambda n, r: -n - 2)),
    "offset_far": ("idx", one_of(*offsets, lambda n, r: 2**62)),
    "offsets_swapped": ("idx", swap_offsets),
    "mark_negative": ("idx", one_of(*marks, lambda n, r: -n - 1)),
    "mark_far": ("idx", one_of(*marks, lambda n, r: n + NUM_DOCUMENTS + 1)),
    "tokens_empty": ("bin", lambda c, r: bytearray()),
    "tokens_cut": ("bin", lambda c, r: c[: r.randint(1, len(c))]),
    "tokens_longer": ("bin", lambda c, r: c + bytes(r.randint(1, 99))),
    "tokens_beyond": ("bin", beyond),
}
"""File and damage; a reader has to see these."""
ANY: dict[str, tuple[str, Damage]] = {
    "index_flipped": ("idx", flip(0, None)),
    "header_flipped": ("idx", flip(9, START)),
    "lengths_flipped": ("idx", flip(LENGTHS_AT, OFFSETS_AT)),
    "offsets_flipped": ("idx", flip(OFFSETS_AT, MARKS_AT)),
    "marks_flipped": ("idx", flip(MARKS_AT, None)),
    "index_zeros": ("idx", fill(0)),
    "index_ones": ("idx", fill(255)),
    "same_width": ("idx", code(3)),
    "tokens_flipped": ("bin", flip(0, None)),
    "tokens_zeros": ("bin", fill(0)),
    "tokens_ones": ("bin", fill(255)),
}
"""Damage that may change nothing, or tokens into other tokens of the vocabulary."""


def read_all(prefix: Path) -> list[list[int]]:
    """Every document, after every sample of an epoch was read."""
    config = DataConfig(path=str(prefix), seq_length=8)
    dataset = PackedDataset(config, 1, vocab_size=VOCAB)
    for number in range(dataset.samples_per_epoch):
        assert len(dataset[number].tokens) == 8
    return [dataset._piece(i, 0, int(n)).tolist() for i, n in enumerate(dataset.lengths)]


def damaged(folder: Path, corpus: dict[str, bytes], suffix: str, damage: Damage, seed: int) -> Path:
    for name, content in corpus.items():
        (folder / f"c.{name}").write_bytes(content)
    content = bytearray(corpus[suffix])
    changed = damage(content, Rng(seed))
    (folder / f"c.{suffix}").write_bytes(bytes(content if changed is None else changed))
    return folder / "c"


def test_whole_files_are_read(tmp_path: Path, corpus: dict[str, bytes]) -> None:
    prefix = damaged(tmp_path, corpus, "bin", lambda c, r: None, 0)
    found = read_all(prefix)
    assert len(found) == NUM_DOCUMENTS
    whole = np.frombuffer(corpus["bin"], np.uint16)
    assert np.array_equal(np.concatenate(found), whole)


@pytest.mark.parametrize("name", REFUSED)
def test_damage_that_shows_is_one_error_with_path_and_remedy(
    tmp_path: Path, corpus: dict[str, bytes], name: str
) -> None:
    suffix, damage = REFUSED[name]
    for seed in range(10):
        prefix = damaged(tmp_path, corpus, suffix, damage, seed)
        if Path(f"{prefix}.{suffix}").read_bytes() == corpus[suffix]:
            continue  # two flips of one bit
        with pytest.raises(RecipeError) as error:
            read_all(prefix)
        said = str(error.value)
        assert str(prefix) in said and "; " in said
        assert "pack it again" in said or "make it with" in said or "pack the text" in said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ANY)
def test_any_damage_is_an_error_or_reads_the_same_tokens(
    tmp_path: Path, corpus: dict[str, bytes], name: str
) -> None:
    suffix, damage = ANY[name]
    whole = read_all(damaged(tmp_path, corpus, suffix, lambda c, r: None, 0))
    for seed in range(40):
        try:
            found = read_all(damaged(tmp_path, corpus, suffix, damage, seed))
        except RecipeError as error:
            assert str(tmp_path / "c") in str(error) and len(str(error).splitlines()) == 1
            continue
        if suffix == "idx":
            assert found == whole
        else:  # other tokens, and nothing else
            assert [len(d) for d in found] == [len(d) for d in whole]
            assert all(0 <= t < VOCAB for d in found for t in d)
            assert all(d[-1] == EOD for d in found)


def test_errors_name_the_place(tmp_path: Path, corpus: dict[str, bytes]) -> None:
    def says(suffix: str, damage: Damage) -> str:
        with pytest.raises(RecipeError) as error:
            read_all(damaged(tmp_path, corpus, suffix, damage, 3))
        return str(error.value)

    assert f"{tmp_path}/c.idx with version 99 at byte 9 instead of 1;" in says("idx", version(99))
    assert "with type code 7 at byte 17, not one of 1, 2, 3, 4, 5, 8;" in says("idx", code(7))
    third = put_number(OFFSETS_AT + 16, "<q")
    assert "with offset -4 of number 2, which must be where" in says("idx", third(-4))
    fifth = put_number(LENGTHS_AT + 16, "<i")
    assert "with length -1 of number 4, which must be at least 1;" in says("idx", fifth(-1))
    mark = put_number(MARKS_AT + 8, "<q")
    assert "with document 50 of number 1, which must be at most the next" in says("idx", mark(50))
    size, half = len(corpus["bin"]), len(corpus["bin"]) // 2
    cut = f"{tmp_path}/c.bin with {half:,} bytes instead of the {size:,} of {tmp_path}/c.idx;"
    assert cut in says("bin", lambda c, r: c[:half])
    token = says("bin", put_number(6, "<H")(300))
    assert "one of the 257 ids in the model's vocabulary, got 300 at byte 6 of" in token
    assert "in document 1; set model.vocab_size to the tokenizer's, or pack" in token
    assert "got 257 at byte 6 of" in says("bin", put_number(6, "<H")(VOCAB))


def test_a_lost_eod_is_seen_in_any_document(tmp_path: Path, corpus: dict[str, bytes]) -> None:
    """The start looks at the first few; the others are looked at where they are read."""
    last = put_number(len(corpus["bin"]) - 2, "<H")
    with pytest.raises(RecipeError, match=r"end with data.eod_token 256, got 97 .* document 59"):
        read_all(damaged(tmp_path, corpus, "bin", last(97), 0))


def test_files_that_cannot_be_read_are_named(tmp_path: Path, corpus: dict[str, bytes]) -> None:
    from megatron_magi.training.data.index_file import IndexFile

    prefix = damaged(tmp_path, corpus, "bin", lambda c, r: None, 0)
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(RecipeError, match=r"two files that can be read, got .*c\.bin.*permissions"):
        IndexFile(str(prefix))


def test_a_dry_run_knows_the_vocabulary(tmp_path: Path, corpus: dict[str, bytes]) -> None:
    from megatron_magi.training.estimate.dry_run import dry_run
    from megatron_magi.training.recipe.recipe import build_config

    omegaconf = pytest.importorskip("omegaconf")
    prefix = damaged(tmp_path, corpus, "bin", lambda c, r: c.replace(b"a\0", b"\1\1"), 0)
    plain = {"model": {"vocab_size": VOCAB}, "data": {"path": str(prefix), "seq_length": 64}}
    with pytest.raises(RecipeError, match="one of the 257 ids in the model's vocabulary, got 257"):
        dry_run(build_config([omegaconf.OmegaConf.create(plain)]))


def test_commands_say_it_in_a_line(
    tmp_path: Path, corpus: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = damaged(tmp_path, corpus, "idx", version(99), 0)
    command = ["plan", "--data", str(prefix), "--seq-length", "64", "--cp", "2"]
    assert main(command) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: a data file must have Megatron's index, got ")
