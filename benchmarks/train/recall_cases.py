"""The runs of docs/convergence_protocol.md on tokens that only far keys foretell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.train import flag_masks, recall_corpus
from benchmarks.train.flag_cases import (
    DOCUMENT_SCHEDULE,
    MODEL,
    SCHEDULE,
    VALIDATION,
    WEIGHTS_ALONE,
    Run,
)
from benchmarks.train.pretrain_cases import DOCUMENTS, MAGI, SMALL, Flags, layout
from benchmarks.train.pretrain_te import CUDNN, TE

STEPS = recall_corpus.SAMPLES["train"]
FOLDER = "recall"
"""Of this corpus, in the folder of the other one."""
RECALL_SCHEDULE: Flags = {
    "global-batch-size": 1,
    "train-iters": STEPS,
    "lr": 1e-3,
    "min-lr": 1e-4,
    "lr-warmup-iters": 100,
    "lr-decay-iters": STEPS,
    "eval-interval": STEPS,
    "exit-interval": STEPS,
    "seq-length": recall_corpus.LENGTH,
    "max-position-embeddings": recall_corpus.LENGTH,
    "rotary-base": 1_000_000,
    "vocab-size": recall_corpus.EOD,
}
MASKS = {
    "recall_right_mask": flag_masks.right_mask,
    "recall_first_keys": flag_masks.first_keys,
    "recall_split": flag_masks.split_documents,
    "recall_joined": flag_masks.joined_documents,
}
"""Masks of runs on the weights of `recall_magi`, the first without an error."""
STILL: Flags = {"lr": 0.0, "min-lr": 0.0, "lr-warmup-iters": 0}
"""For a run that validates the weights that it loads: its only step changes none of them."""


def recall_runs(work: Path) -> list[Run]:
    """Stock on one GPU and ours on two, which train; then both on the weights that the other
    trained, and ours with errors on its own weights."""
    base = {**TE, "split": None, **MODEL, **SCHEDULE, **VALIDATION}
    base = {**base, **SMALL, **DOCUMENT_SCHEDULE, **RECALL_SCHEDULE, **DOCUMENTS}
    stock = Run("recall_te", {**base, **CUDNN}, gpus=1, corpus=FOLDER, ends=recall_corpus.buckets())
    ours = replace(stock, name="recall_magi", flags={**base, **MAGI, **layout(cp=2)}, gpus=2)
    wrong = [
        replace(
            ours, name=name, flags={**ours.flags, "magi-mask": f"{made.__module__}:{made.__name__}"}
        )
        for name, made in MASKS.items()
    ]
    crossed = [replace(stock, name="recall_te_of_magi"), replace(ours, name="recall_magi_of_te")]
    return [
        _saving(stock, work),
        _saving(ours, work),
        _validating(crossed[0], work / ours.name),
        _validating(crossed[1], work / stock.name),
        *(_validating(run, work / ours.name) for run in wrong),
    ]


def _saving(run: Run, work: Path) -> Run:
    save = {"save": str(work / run.name), "save-interval": STEPS, **WEIGHTS_ALONE}
    return replace(run, flags={**run.flags, **save})


def _validating(run: Run, weights: Path) -> Run:
    """One step that changes nothing, from these weights, and the validation after it."""
    step = STEPS + 1
    ending = {"train-iters": step, "exit-interval": step, "eval-interval": step}
    load = {"load": str(weights), "no-load-optim": True, "no-load-rng": True}
    return replace(run, flags={**run.flags, **STILL, **ending, **load})
