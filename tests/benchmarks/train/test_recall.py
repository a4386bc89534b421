"""Tokens that only far keys foretell: their corpus, their runs, and what is made of the losses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.train import flag_masks, recall, recall_cases, recall_corpus
from megatron_magi.cli.parser import UsageError
from megatron_magi.launcher.documents import MaskRequest
from megatron_magi.training.parity.positions import Bucket, write_positions

LENGTH = recall_corpus.LENGTH // 2
"""Of a document of validation."""


@pytest.mark.parametrize("length", [recall_corpus.SHORTEST, 3000, LENGTH])
def test_every_needle_is_repeated_once_and_far_ones_last(length: int) -> None:
    tokens = recall_corpus.document(length, np.random.default_rng(3))
    repeats = recall_corpus.repeats(length)
    assert len(tokens) == length - 1 and repeats[-1].end == length - 1
    needles = tokens[tokens < recall_corpus.NEEDLE_IDS]
    size = repeats[0].end - repeats[0].start
    assert len(needles) == 2 * recall_corpus.NEEDLES * size
    for repeat in repeats:
        first = repeat.needle * size
        assert np.array_equal(tokens[first : first + size], tokens[repeat.start : repeat.end])
        assert repeat.distance == repeat.start - first
    assert len({*needles.tolist()}) == len(needles) // 2, "a token has one place to be found at"
    assert all(one.end <= two.start for one, two in pairwise(repeats))


def test_sets_have_a_token_more_than_is_read() -> None:
    documents = recall_corpus.sets()["valid"]
    tokens = [len(document) for document in documents]
    assert tokens == [LENGTH] * (2 * recall_corpus.SAMPLES["valid"] + 1)
    ends = recall_corpus.buckets()
    repeats = recall_corpus.repeats(LENGTH)
    assert ends[:-1:2] == tuple(repeat.start for repeat in repeats)
    assert ends[1::2] == tuple(repeat.end - 1 for repeat in repeats) and list(ends) == sorted(ends)


def test_masks_hide_what_the_verdicts_say() -> None:
    """Of two documents: who sees a token's first place, for each of the last repeat's queries."""
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


def test_runs_load_what_others_save(tmp_path: Path) -> None:
    runs = {run.name: run for run in recall_cases.recall_runs(tmp_path)}
    assert set(runs) == {*recall.TRAINED, *recall.SAME_WEIGHTS, *recall.ERRORS}
    saved = {name: run.flags.get("save") for name, run in runs.items() if not run.is_late}
    assert saved == {name: str(tmp_path / name) for name in recall.TRAINED}
    for name, run in runs.items():
        assert run.validates and run.flags["dataloader-inter-document-masking"]
        if run.is_late:
            other = "recall_te" if name == "recall_magi_of_te" else "recall_magi"
            assert run.flags["load"] == str(tmp_path / other) and run.flags["lr"] == 0
        assert run.gpus == (1 if "recall_te" in (name, name.removesuffix("_of_magi")) else 2)


def written(folder: Path, losses: dict[str, list[float]]) -> None:
    ends = (0, *recall_corpus.buckets())
    for name, of_needles in losses.items():
        (folder / name).mkdir()
        values = [value for loss in of_needles for value in (3.0, loss)] + [3.0]
        buckets = [Bucket(601, *bounds) for bounds in pairwise(ends)]
        write_positions(folder / name, dict(zip(buckets, values, strict=True)))


def test_verdicts(tmp_path: Path) -> None:
    names = (*recall.TRAINED, *recall.SAME_WEIGHTS, *recall.ERRORS)
    losses = {name: [0.01, 0.02, 0.03, 0.04] for name in names}
    losses["recall_te"][3] = 0.5
    losses["recall_first_keys"][3] = 6.0
    losses["recall_split"] = [0.01, 0.02, 5.0, 0.9]
    losses["recall_joined"] = [0.4, 0.4, 0.5, 0.6]
    written(tmp_path, losses)
    verdicts = {line.name: line.verdict for line in recall.lines(tmp_path)}
    assert verdicts == {
        "recall_te": "NOT learned: tells nothing",
        "recall_magi": "learned",
        "recall_magi_of_te": "FAILED (4.6e-01)",
        "recall_te_of_magi": "pass (0.0e+00)",
        "recall_right_mask": "pass (0.0e+00)",
        "recall_first_keys": "caught",
        "recall_split": "NOT caught",
        "recall_joined": "caught",
    }
    (tmp_path / "recall_split" / "positions.csv").unlink()
    with pytest.raises(UsageError, match=r"a validated run is needed, got none in .*recall_split"):
        recall.lines(tmp_path)
