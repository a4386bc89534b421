"""Tokens that one key foretells: their corpus, their runs, and what is made of the counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.train import flag_masks, flag_rank, recall, recall_cases, recall_corpus
from benchmarks.train.flag_cases import EOD
from benchmarks.train.recall_counts import COUNTS, MISSED, Counts, RecalledTokens
from megatron_magi.cli.parser import UsageError
from megatron_magi.launcher.documents import MaskRequest

DOCUMENT, BLOCK = recall_corpus.DOCUMENT, recall_corpus.BLOCK


@pytest.mark.parametrize("length", [34, 65, 1000, DOCUMENT])
def test_every_repeated_token_follows_from_one_key(length: int) -> None:
    tokens = recall_corpus.document(length, np.random.default_rng(3))
    assert len(tokens) == length - 1 and tokens.max() < EOD
    middle = recall_corpus.first_repeated(length)
    first, second = tokens[:middle], tokens[middle:]
    assert len({*first.tolist()}) == middle, "a token has one place to be found at"
    assert sorted(second.tolist()) == sorted(first[1 : 1 + len(second)].tolist())
    place = {token: i for i, token in enumerate(first.tolist())}
    positions = np.arange(length)
    counted = positions[recall_corpus.foretold(positions, length)]
    assert len(counted) == len(second) // BLOCK * (BLOCK - 1)
    for position in counted:
        key = place[int(tokens[position])] + 1
        assert first[key] == tokens[position + 1], "the token behind its first place"


def test_blocks_come_back_in_an_order_of_each_document() -> None:
    rng = np.random.default_rng(3)
    orders = []
    for _ in range(2):
        tokens = recall_corpus.document(1000, rng)
        heads = tokens[recall_corpus.first_repeated(1000) :: BLOCK]
        orders.append([np.flatnonzero(tokens == head)[0] for head in heads])
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(1, 482, BLOCK)]
    assert orders[0] != orders[1] != sorted(orders[1])


def test_sets_have_a_document_more_than_is_read() -> None:
    for name, samples in recall_corpus.SAMPLES.items():
        documents = [*recall_corpus.sets()[name]]
        assert {len(document) for document in documents} == {DOCUMENT}
        assert len(documents) == 2 * samples + 1
        assert all(document[-1] == EOD for document in documents)


def test_masks_hide_what_the_protocol_says() -> None:
    request = MaskRequest((0, 4096, 8192), None)
    right = flag_masks.right_mask(request).to_dense()
    hidden = flag_masks.first_keys(request).to_dense()
    for start in (0, 4096):
        assert not hidden[start + 3968 : start + 4096, start : start + 512].any()
        hidden[start + 3968 : start + 4096, start : start + 512] = True
    assert np.array_equal(hidden, right)
    split = flag_masks.split_documents(request).to_dense()
    assert not split[2048:4096, :2048].any() and (right & ~split).sum() == 2 * 2048**2
    joined = flag_masks.joined_documents(request).to_dense()
    assert np.array_equal(joined, np.tril(np.ones((8192, 8192), dtype=bool)))


def test_runs_train_nothing_and_count_recalled_tokens() -> None:
    runs = {run.name: run for run in recall_cases.recall_runs()}
    assert set(runs) == {recall.STOCK, *recall.OURS, *recall.ERRORS}
    for name, run in runs.items():
        assert run.validates and run.flags["dataloader-inter-document-masking"]
        assert run.flags["lr"] == run.flags["min-lr"] == 0 and run.flags["train-iters"] == 1
        assert run.environment == {flag_rank.RECALL: "1"} and run.corpus == "recall"
        assert run.gpus == run.flags.get("context-parallel-size", 1)
        is_ours = run.flags["attention-backend"] == "magi"
        assert is_ours == (name != recall.STOCK) and run.gpus == 1 + (is_ours and "cp1" not in name)
        assert ("magi-mask" in run.flags) == (name in recall_cases.MASKS)


def test_missed_tokens_are_counted() -> None:
    record = RecalledTokens()
    positions = torch.arange(DOCUMENT)[None]
    losses = torch.full((1, DOCUMENT), 9.0)
    inside = recall_corpus.foretold(positions, DOCUMENT)
    losses[inside] = 0.0
    tokens = int(inside.sum())
    losses[0, int(inside[0].nonzero()[7])] = 2 * MISSED
    record.add(losses, positions)
    record.add(losses, positions)
    assert record._sums.tolist() == [2 * tokens, 2, 4 * MISSED]
    record.clear()
    assert record._sums.tolist() == [0, 0, 0]


def written(folder: Path, counts: dict[str, Counts]) -> None:
    for name, found in counts.items():
        (folder / name).mkdir()
        (folder / name / COUNTS).write_text(json.dumps(dataclasses.asdict(found)))


def test_verdicts(tmp_path: Path) -> None:
    names = (recall.STOCK, *recall.OURS, *recall.ERRORS)
    counts = {name: Counts(1000, 0, 1e-6) for name in names}
    counts["recall_magi"] = Counts(1000, 1, 0.01)
    counts["recall_right_mask"] = Counts(999, 0, 1e-6)
    counts["recall_split"] = Counts(1000, 1000, 9.0)
    written(tmp_path, counts)
    assert {line.name: line.verdict for line in recall.lines(tmp_path)} == {
        "recall_te": "recalled",
        "recall_magi_cp1": "pass",
        "recall_magi": "FAILED",
        "recall_right_mask": "NOT counted: tells nothing",
        "recall_moved_by_one": "NOT caught",
        "recall_first_keys": "NOT caught",
        "recall_split": "caught",
        "recall_joined": "NOT caught",
    }
    (tmp_path / "recall_split" / COUNTS).unlink()
    with pytest.raises(UsageError, match=r"a validated run is needed, got no recall\.json in .*"):
        recall.lines(tmp_path)


def test_a_stock_run_that_misses_tokens_tells_nothing() -> None:
    assert recall.verdict(recall.STOCK, Counts(9, 1, 1.0), 9) == "NOT recalled: tells nothing"
    assert recall.verdict("recall_magi", Counts(0, 0, 0.0), 0) == "NOT counted: tells nothing"
