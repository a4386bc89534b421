"""The runs of docs/results/convergence_protocol.md on tokens that only one key foretells."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.train import flag_masks, recall_corpus, recall_weights
from benchmarks.train.flag_cases import MODEL, SCHEDULE, VALIDATION, Run
from benchmarks.train.flag_rank import RECALL
from benchmarks.train.pretrain_cases import DOCUMENTS, MAGI, Flags, layout
from benchmarks.train.pretrain_te import CUDNN, TE

FOLDER = "recall"
"""Of this corpus, in the folder of the other one."""
STILL: Flags = {
    "global-batch-size": 1,
    "seq-length": recall_corpus.LENGTH,
    "max-position-embeddings": recall_corpus.LENGTH,
    "train-iters": 1,
    "lr": 0.0,
    "min-lr": 0.0,
    "lr-warmup-iters": 0,
    "lr-decay-iters": 1,
    "eval-interval": 1,
    "exit-interval": 1,
}
"""The only step changes no weight; the validation follows it."""
MASKS = {
    "recall_right_mask": flag_masks.right_mask,
    "recall_moved_by_one": flag_masks.moved_by_one,
    "recall_first_keys": flag_masks.first_keys,
    "recall_split": flag_masks.split_documents,
    "recall_joined": flag_masks.joined_documents,
}
"""Masks of runs of ours, the first without an error."""


def recall_runs() -> list[Run]:
    """A model that copies, with stock attention on one GPU, with ours on one and on two, and with
    masks that a function gives."""
    base = {**TE, "split": None, **MODEL, **SCHEDULE, **VALIDATION}
    base = {**base, **recall_weights.MODEL, **STILL, **DOCUMENTS}
    measured = Run("recall_te", {**base, **CUDNN}, gpus=1, environment={RECALL: "1"}, corpus=FOLDER)
    alone = replace(measured, name="recall_magi_cp1", flags={**base, **MAGI})
    ours = replace(alone, name="recall_magi", flags={**alone.flags, **layout(cp=2)}, gpus=2)
    masked = [
        replace(
            ours, name=name, flags={**ours.flags, "magi-mask": f"{made.__module__}:{made.__name__}"}
        )
        for name, made in MASKS.items()
    ]
    return [measured, alone, ours, *masked]
