"""Packing and reading back: nothing lost, boundaries where the EODs are, one order for all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.core.mask import AttnMask
from megatron_magi.training.data import packed_samples
from megatron_magi.training.data.packed_samples import (
    PackedDataset,
    PackedSample,
    is_held_out,
    mask_of_documents,
    microbatch_indices,
    move_boundary,
    prefetch,
)
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_values import DataConfig
from tests.training.small_corpus import ByteTokenizer, Document, pack

EOD = 256
LENGTHS = (5, 40, 1, 17, 64, 3, 90, 2, 33)
TEXTS = [bytes(65 + (i * 7 + j) % 26 for j in range(n)) for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("packed") / "corpus"
    pack((Document(f"d{i}", t) for i, t in enumerate(TEXTS)), target, ByteTokenizer())
    return target


def open_dataset(
    prefix: Path, seq_length: int = 32, seed: int = 1, **fields: object
) -> PackedDataset:
    return PackedDataset(DataConfig(path=str(prefix), seq_length=seq_length, **fields), seed)  # type: ignore[arg-type]


def mask_of(sample: PackedSample, config: DataConfig) -> AttnMask:
    return mask_of_documents(sample.cu_seqlens, config)


def epoch_stream(dataset: PackedDataset, epoch: int = 0) -> np.ndarray:
    """An epoch's tokens put together from its samples, in stream order."""
    pieces = {}
    n = dataset.samples_per_epoch
    rng = np.random.RandomState([dataset.seed, epoch])
    rng.permutation(len(dataset.lengths))
    order = rng.permutation(n)
    for number in range(n):
        pieces[order[number]] = dataset[epoch * n + number].tokens
    return np.concatenate([pieces[k] for k in range(n)])


def test_every_text_reads_back_with_its_eod(prefix: Path) -> None:
    dataset = open_dataset(prefix)
    assert dataset.lengths.tolist() == [n + 1 for n in LENGTHS]
    for i, text in enumerate(TEXTS):
        ids = dataset.indexed.get(i)
        assert ids[-1] == EOD
        assert ids[ids < 256].astype(np.uint8).tobytes() == text


@pytest.mark.parametrize("seq_length", [1, 7, 32, 100])
def test_an_epoch_is_all_documents_end_to_end(prefix: Path, seq_length: int) -> None:
    stream = epoch_stream(open_dataset(prefix, seq_length))
    text = stream.astype(np.int64).tolist()
    whole = [i for d in _stream_documents(text) for i in d]
    assert whole == text
    total = sum(LENGTHS) + len(LENGTHS)
    assert len(stream) == (total - 1) // seq_length * seq_length
    complete = [bytes(d[:-1]) for d in _stream_documents(text) if d[-1] == EOD]
    assert set(complete) <= set(TEXTS)
    assert len(complete) >= len(TEXTS) - 1 - seq_length // 4


def _stream_documents(text: list[int]) -> Iterator[list[int]]:
    start = 0
    for i, token in enumerate(text):
        if token == EOD:
            yield text[start : i + 1]
            start = i + 1
    if start < len(text):
        yield text[start:]


def test_labels_are_the_next_tokens_and_stop_at_documents(prefix: Path) -> None:
    dataset = open_dataset(prefix)
    for i in range(dataset.samples_per_epoch):
        sample = dataset[i]
        assert np.array_equal(sample.labels[:-1], sample.tokens[1:])
        assert np.array_equal(sample.loss_mask == 0, sample.tokens == EOD)
    ours = open_dataset(prefix, mask_across_documents=False)[0]
    assert ours.loss_mask.all()


def test_boundaries_stand_behind_every_eod(prefix: Path) -> None:
    dataset = open_dataset(prefix, 50)
    seen_inner = 0
    for i in range(dataset.samples_per_epoch):
        sample = dataset[i]
        inner = (np.flatnonzero(sample.tokens == EOD) + 1).tolist()
        assert sample.cu_seqlens.tolist() == sorted({0, *inner, 50})
        assert len(sample.documents) >= len(sample.cu_seqlens) - 1
        seen_inner += len(inner)
    assert seen_inner > 3


@pytest.mark.parametrize("seq_length", [1, 7, 32, 50])
def test_the_index_alone_gives_the_same_boundaries(prefix: Path, seq_length: int) -> None:
    dataset = open_dataset(prefix, seq_length)
    reads: list[int] = []
    expected = [dataset[i].cu_seqlens for i in range(2 * dataset.samples_per_epoch)]
    dataset.indexed.get = lambda *_: reads.append(1)  # type: ignore[method-assign, assignment]
    for i, cu_seqlens in enumerate(expected):
        found = dataset.boundaries(i)
        assert found.dtype == np.int32 and np.array_equal(found, cu_seqlens)
    assert not reads


def test_an_empty_document_is_no_boundary_of_its_own(prefix: Path) -> None:
    dataset = open_dataset(prefix, 50)
    before = [dataset.boundaries(i).tolist() for i in range(dataset.samples_per_epoch)]
    dataset.lengths = np.append(dataset.lengths, 0)
    dataset.documents = np.arange(len(dataset.lengths))
    packed_samples._epoch_order.cache_clear()
    after = [dataset.boundaries(i).tolist() for i in range(dataset.samples_per_epoch)]
    assert all(len(set(ends)) == len(ends) for ends in after)
    assert sum(map(len, before)) - 2 <= sum(map(len, after)) <= sum(map(len, before)) + 2
    packed_samples._epoch_order.cache_clear()


def test_the_mask_is_causal_inside_documents(prefix: Path) -> None:
    dataset = open_dataset(prefix, 24)
    for i in range(dataset.samples_per_epoch):
        sample = dataset[i]
        document = np.cumsum(np.concatenate([[0], sample.tokens[:-1] == EOD]))
        same = document[:, None] == document[None, :]
        expected = same & np.tri(24, dtype=bool)
        assert np.array_equal(mask_of(sample, dataset.config).to_dense(), expected)
        windowed = DataConfig(path="x", window=4)
        near = np.subtract.outer(np.arange(24), np.arange(24)) < 4
        assert np.array_equal(mask_of(sample, windowed).to_dense(), expected & near)
        plain = DataConfig(path="x", mask="causal")
        assert np.array_equal(mask_of(sample, plain).to_dense(), np.tri(24, dtype=bool))


def test_the_negative_control_moves_one_boundary(prefix: Path) -> None:
    cu_seqlens = np.array([0, 4, 9, 20], dtype=np.int32)
    assert move_boundary(cu_seqlens, 2).tolist() == [0, 6, 9, 20]
    assert move_boundary(cu_seqlens, 50).tolist() == [0, 9, 9, 20]
    assert move_boundary(cu_seqlens, -50).tolist() == [0, 0, 9, 20]
    assert move_boundary(cu_seqlens[[0, 3]], 2).tolist() == [0, 20]
    dataset = open_dataset(prefix, 50)
    changed = DataConfig(path="x", moved_boundary=1)
    for i in range(dataset.samples_per_epoch):
        sample = dataset[i]
        moved = mask_of(sample, changed) != mask_of(sample, dataset.config)
        assert moved == (len(sample.cu_seqlens) > 2)


def test_order_depends_on_seed_and_epoch_alone(prefix: Path) -> None:
    first, second = open_dataset(prefix), open_dataset(prefix)
    n = first.samples_per_epoch
    ids = range(2 * n)
    backwards = {i: second[i].tokens for i in reversed(ids)}
    assert all(np.array_equal(first[i].tokens, backwards[i]) for i in ids)
    epochs = [np.concatenate([first[i].tokens for i in range(e * n, e * n + n)]) for e in (0, 1)]
    assert not np.array_equal(*epochs)
    other_seed = open_dataset(prefix, seed=2)
    assert any(not np.array_equal(first[i].tokens, other_seed[i].tokens) for i in range(n))


@pytest.mark.parametrize("dp", [1, 2, 3, 6])
def test_replicas_share_each_batch_without_gaps(dp: int) -> None:
    per_step = 6 // dp
    streams = [list(islice(microbatch_indices(6, r, dp), 3 * per_step)) for r in range(dp)]
    for step in range(3):
        taken = [i for s in streams for i in s[step * per_step : (step + 1) * per_step]]
        assert sorted(taken) == list(range(step * 6, step * 6 + 6))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetch_keeps_order_and_ends(depth: int) -> None:
    assert list(prefetch(lambda i: i * i, iter(range(7)), depth)) == [i * i for i in range(7)]


def test_prefetch_raises_where_the_item_is_taken() -> None:
    stream = prefetch(lambda i: 1 // i, iter([1, 0]), 2)
    assert next(stream) == 1
    with pytest.raises(ZeroDivisionError):
        next(stream)


def test_documents_are_named(prefix: Path) -> None:
    dataset = open_dataset(prefix)
    names = dataset.document_names(dataset[0])
    assert names == [f"{d} (d{d})" for d in dataset[0].documents]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"path": "nowhere"}, "no nowhere.bin"),
        ({"seq_length": 1000}, "more tokens than data.seq_length 1000, got 264"),
        ({"eod_token": 7}, "end with data.eod_token 7, got 256"),
    ],
    ids=["missing", "short", "eod"],
)
def test_bad_data_is_one_clear_error(prefix: Path, fields: dict[str, object], says: str) -> None:
    config = DataConfig(**{"path": str(prefix), "seq_length": 32, **fields})  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=says):
        PackedDataset(config, 0)


def test_what_preprocess_data_writes_is_read_as_it_is(tmp_path: Path) -> None:
    """Its loop: the ids of a document, EOD appended, into a builder of the vocabulary's type."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    eod, prefix = 128_001, f"{tmp_path}/corpus_text_document"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(128_256))
    documents = [[i * 7000 + 65_000 + j for j in range(9)] for i in range(8)]
    for ids in documents:
        builder.add_document([*ids, eod], [len(ids) + 1])
    builder.finalize(f"{prefix}.idx")
    dataset = PackedDataset(DataConfig(path=prefix, seq_length=20, eod_token=eod), 1)
    assert dataset.samples_per_epoch == 3
    stream = epoch_stream(dataset).tolist()
    for start in range(0, 60, 10):
        assert stream[start : start + 10] in [[*ids, eod] for ids in documents]
    for i in range(3):
        assert dataset[i].cu_seqlens.tolist() == [0, 10, 20]
        assert dataset[i].loss_mask.sum() == 18


# Held-out documents.


def test_validation_and_training_share_no_document(prefix: Path) -> None:
    config = DataConfig(path=str(prefix), seq_length=24)
    train = PackedDataset(config, 1, held_out=0.3)
    held = PackedDataset(config, 1, held_out=0.3, validation=True)
    together = sorted([*train.documents, *held.documents])
    assert together == list(range(len(train.lengths)))
    assert len(held.documents) and len(train.documents)
    for dataset in (train, held):
        mine = set(dataset.documents.tolist())
        used = [set(dataset[i].documents) for i in range(2 * dataset.samples_per_epoch)]
        assert set().union(*used) <= mine
    other_seed = PackedDataset(config, 2, held_out=0.3, validation=True)
    assert np.array_equal(other_seed.documents, held.documents)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1, 0.5])
def test_the_held_out_share_is_even(fraction: float) -> None:
    chosen = is_held_out(10_000, fraction)
    assert abs(int(chosen.sum()) - 10_000 * fraction) <= 3
    for block in chosen.reshape(10, -1):
        assert abs(int(block.sum()) - 1000 * fraction) <= 3
    assert np.array_equal(is_held_out(100, fraction), chosen[:100])  # more data changes nothing


def test_holding_nothing_out_changes_nothing(prefix: Path) -> None:
    plain = open_dataset(prefix)
    same = PackedDataset(plain.config, plain.seed, held_out=0.0)
    assert np.array_equal(plain.documents, np.arange(len(plain.lengths)))
    assert np.array_equal(plain[3].tokens, same[3].tokens)


def test_too_little_to_hold_out_is_one_clear_error(prefix: Path) -> None:
    config = DataConfig(path=str(prefix), seq_length=200)
    with pytest.raises(RecipeError, match=r"200 for validation, got \d+ .*change validation"):
        PackedDataset(config, 1, held_out=0.1, validation=True)


def test_a_later_start_reads_what_would_have_come() -> None:
    whole = list(islice(microbatch_indices(6, 1, 3), 8))
    assert list(islice(microbatch_indices(6, 1, 3, first=12), 4)) == whole[4:]
