"""The runs of docs/convergence_protocol.md: Megatron's script with TransformerEngine's layers.

A run is `pretrain_gpt.py` with flags. Controls have one error; the masks of three of them are
functions for `--magi-mask`, and the errors of the others are made by flag_rank.py.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.train.pretrain_cases import DOCUMENTS, MAGI, Flags, layout
from benchmarks.train.pretrain_te import CUDNN, DETERMINISTIC, REPEATABLE, TE, TENSORWISE
from megatron_magi import AttnMask, masks
from megatron_magi.launcher.documents import MaskRequest

STEPS, CONTROL_STEPS, SAVED_AT = 400, 60, 200
"""Steps of a run and of a control, and the step whose checkpoint gradients are compared at."""
FP8_STEPS = 300
"""Steps of a run whose linear layers compute in fp8."""
EOD = 32767
"""The token that ends a file; with it the vocabulary has 32,768."""
BUCKETS = (512, 2048, 8192, 32768)
"""Where the buckets of positions end; those behind a sample's end stay empty."""

MODEL: Flags = {
    "num-layers": 16,
    "hidden-size": 2048,
    "num-attention-heads": 32,
    "num-query-groups": 8,
    "ffn-hidden-size": 8192,
    "seq-length": 8192,
    "max-position-embeddings": 8192,
    "vocab-size": EOD,
    "seed": 1234,
}
SCHEDULE: Flags = {
    "global-batch-size": 2,
    "train-iters": STEPS,
    "lr": 3e-5,
    "min-lr": 3e-6,
    "lr-decay-style": "cosine",
    "lr-warmup-iters": 100,
    "lr-decay-iters": STEPS,
    "adam-beta2": 0.95,
}
"""At 1e-4 after 40 steps of warm-up, stock runs were 0.8 % apart: nothing could be told."""
VALIDATION: Flags = {
    "full-validation": True,
    "multiple-validation-sets": True,
    "eval-global-batch-size": 1,
    "eval-iters": 1,
    "eval-interval": SAVED_AT,
    "exit-interval": STEPS,
}
"""Every sample of the validation set, the same ones each time; Megatron counts them itself, and
fails in doing so for one set that is not in a list, and in another validation behind the last
step, before which these runs exit."""
DETERMINISTIC_STOCK, DETERMINISTIC_OURS = "deterministic_te_p2p", "magi_deterministic"
"""Runs that are judged beside each other: Megatron's mode changes the embedding's gradient."""
WEIGHTS_ALONE: Flags = {"no-save-optim": True, "no-save-rng": True}
TILE, BLOCK = 128, 1024
"""Queries, and keys before them that they do not see, of controls."""
SMALL_MODEL: Flags = {
    "num-layers": 12,
    "hidden-size": 768,
    "num-attention-heads": 12,
    "num-query-groups": 4,
    "ffn-hidden-size": 2048,
    "seq-length": 32768,
    "max-position-embeddings": 32768,
}
"""126 million parameters, of which 600 steps read 39 million tokens, every token three times."""
DOCUMENT_SCHEDULE: Flags = {
    "global-batch-size": 2,
    "train-iters": 600,
    "lr": 1e-4,
    "min-lr": 1e-5,
    "lr-warmup-iters": 60,
    "lr-decay-iters": 600,
    "eval-interval": 300,
    "exit-interval": 600,
}


SEEDS = range(1, 9)
"""Of the paired runs: each draws other weights and another order of the samples."""
PAIRED_SCHEDULE: Flags = {
    "micro-batch-size": 4,
    "global-batch-size": 4,
    "eval-global-batch-size": 4,
    "train-iters": 300,
    "lr": 1e-4,
    "min-lr": 1e-5,
    "lr-warmup-iters": 60,
    "lr-decay-iters": 300,
    "eval-interval": 300,
    "exit-interval": 300,
}


@dataclass(frozen=True)
class Run:
    """One run of the script."""

    name: str
    flags: Flags
    """What it gets beside the data."""
    gpus: int = 2
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of its processes."""
    error: str | None = None
    """What flag_rank.py breaks."""
    gradients_of: str | None = None
    """The run whose gradients this one writes, in its only step."""

    @property
    def validates(self) -> bool:
        """Whether losses of held-out samples are measured."""
        return bool(self.flags["eval-interval"] <= self.flags["train-iters"])


def long_runs() -> list[Run]:
    """Three stock runs and one in deterministic mode, and as many of ours: a stock run takes
    longer, so each has one of ours beside it."""
    base = {**TE, "split": None, **MODEL, **SCHEDULE, **layout(cp=2), **VALIDATION}
    ours = Run("magi", {**base, **MAGI})
    p2p, all_gather, a2a = (
        Run(f"te_{way}", {**base, **CUDNN, "cp-comm-type": way})
        for way in ("p2p", "all_gather", "a2a")
    )
    again = replace(ours, name="magi_again")
    deterministic = [_repeatable(p2p, DETERMINISTIC_STOCK), _repeatable(ours, DETERMINISTIC_OURS)]
    return [p2p, ours, all_gather, again, a2a, *deterministic]


def _repeatable(run: Run, name: str) -> Run:
    """The same in deterministic mode."""
    flags = {**run.flags, **DETERMINISTIC}
    return replace(run, name=name, flags=flags, environment=dict(REPEATABLE))


def fp8_runs() -> list[Run]:
    """The same in fp8, tensorwise, but for the deterministic ones; attention stays in bf16."""
    lasting = {
        "train-iters": FP8_STEPS,
        "lr-decay-iters": FP8_STEPS,
        "eval-interval": FP8_STEPS // 2,
        "exit-interval": FP8_STEPS,
    }
    return [
        replace(run, name=f"fp8_{run.name}", flags={**run.flags, **TENSORWISE, **lasting})
        for run in long_runs()
        if "deterministic" not in run.name
    ]


def document_runs() -> list[Run]:
    """Packed documents of 32,768 tokens: two baselines without anything of ours, on one GPU, ours
    on one and on two, and controls of two."""
    base = {**TE, "split": None, **MODEL, **SCHEDULE, **VALIDATION}
    base = {**base, **SMALL_MODEL, **DOCUMENT_SCHEDULE, **DOCUMENTS}
    flex: Flags = {"spec": ["benchmarks.train.pretrain_flex", "layer_spec"]}
    ours = {**base, **MAGI, **layout(cp=2)}
    # Megatron shuffles an epoch by the number of samples that a run asks for: with fewer steps than
    # the others have, controls would read other samples.
    short = {**ours, **ending(CONTROL_STEPS), "train-iters": ours["train-iters"]}
    masked = [
        Run(f"doc_{made.__name__}", {**short, "magi-mask": f"{__name__}:{made.__name__}"})
        for made in (moved_by_one, tile_of_longest, tile_of_shortest)
    ]
    return [
        Run("doc_te", {**base, **CUDNN}, gpus=1),
        Run("doc_flex", {**base, **flex}, gpus=1),
        Run("doc_magi_cp1", {**base, **MAGI}, gpus=1),
        Run("doc_magi_cp2", ours),
        *masked,
        Run("doc_lost_gradients", short, error="lost_gradients"),
    ]


def paired_runs() -> list[Run]:
    """A small model on causal samples, for every seed by stock Megatron, by ours, by ours with its
    mask given by a function, and by that with a tile and with a block missing."""
    base = {**TE, "split": None, **MODEL, **SCHEDULE, **VALIDATION, **layout(cp=2)}
    base = {**base, **SMALL_MODEL, **PAIRED_SCHEDULE}
    base |= {"seq-length": 8192, "max-position-embeddings": 8192}
    kinds: dict[str, Flags] = {
        "te": {**CUDNN, "cp-comm-type": "p2p"},
        "magi": MAGI,
        "right_mask": {**MAGI, "magi-mask": f"{__name__}:right_mask"},
        "near_tile": {**MAGI, "magi-mask": f"{__name__}:near_tile"},
        "near_block": {**MAGI, "magi-mask": f"{__name__}:near_block"},
    }
    return [
        Run(f"paired_{kind}_{seed}", {**base, **flags, "seed": seed})
        for seed in SEEDS
        for kind, flags in kinds.items()
    ]


def checkpointed(run: Run, work: Path) -> Run:
    """The same run, which also saves its weights."""
    save = {"save": str(work / "checkpoint"), "save-interval": SAVED_AT, **WEIGHTS_ALONE}
    return replace(run, flags={**run.flags, **save})


def gradient_runs(work: Path) -> list[Run]:
    """One step of each kind from new weights, and one from the checkpoint of `te_p2p`."""
    load = {
        "load": str(work / "checkpoint"),
        "ckpt-step": SAVED_AT,
        "no-load-optim": True,
        "no-load-rng": True,
    }
    kinds = [run for run in long_runs() if run.name != "magi_again"]
    return [
        _one_step(run, step, {} if step == 1 else load, work)
        for step, run in itertools.product((1, SAVED_AT + 1), kinds)
    ]


def _one_step(run: Run, step: int, load: Flags, work: Path) -> Run:
    name = f"{run.name}_{step}"
    save = {"save": str(work / name), "save-interval": STEPS, "save-wgrads-interval": 1}
    flags = {**run.flags, **ending(step), **save, **WEIGHTS_ALONE, **load}
    return replace(run, name=name, flags=flags, gradients_of=run.name)


def ending(step: int) -> Flags:
    """Flags of a run that ends at this step and validates nothing."""
    return {"train-iters": step, "exit-interval": step, "eval-interval": 100 * STEPS}


def controls() -> list[Run]:
    """Short runs of ours, each with one error."""
    ours = next(run for run in long_runs() if run.name == "magi")
    short = {**ours.flags, **ending(CONTROL_STEPS)}
    wrong = [moved_boundary, shifted_diagonal, far_tile, near_tile]
    named = [
        Run(made.__name__, {**short, "magi-mask": f"{__name__}:{made.__name__}"}) for made in wrong
    ]
    return [*named, Run("lost_gradients", short, error="lost_gradients")]


_calls = itertools.count()
"""Microbatches of this process; a step has two."""


def moved_boundary(request: MaskRequest) -> AttnMask:
    """A boundary in the middle of a sample that should be none, in the first of a step's two."""
    total = request.total_seqlen
    is_first = next(_calls) % int(SCHEDULE["global-batch-size"]) == 0
    return masks.from_cu_seqlens([0, total // 2, total] if is_first else [0, total])


def shifted_diagonal(request: MaskRequest) -> AttnMask:
    """A query sees keys up to the one before it, and the first one sees itself."""
    total = request.total_seqlen
    return _mask([[0, 1, 0, 1, -total, 0], [1, total, 0, total, -total, -1]], total)


def far_tile(request: MaskRequest) -> AttnMask:
    """The last queries do not see the first keys."""
    total = request.total_seqlen
    return _causal(_around(0, total, total - TILE, 0, TILE), total)


def near_tile(request: MaskRequest) -> AttnMask:
    """In every sample, queries in the middle do not see the keys right before them."""
    return _without_middle(request, TILE)


def near_block(request: MaskRequest) -> AttnMask:
    """The same for more queries and keys."""
    return _without_middle(request, BLOCK)


def _without_middle(request: MaskRequest, size: int) -> AttnMask:
    parts = []
    for start, end in pairwise(request.bounds):
        middle = (start + end) // 2
        parts += _around(start, end, middle, middle - size, size)
    return _causal(parts, request.total_seqlen)


def right_mask(request: MaskRequest) -> AttnMask:
    """Causal over every sample, as without a function."""
    return masks.from_cu_seqlens(list(request.bounds))


def moved_by_one(request: MaskRequest) -> AttnMask:
    """The first boundary between two documents is one token late."""
    first, *rest = request.bounds[1:-1] or (request.total_seqlen // 2,)
    return masks.from_cu_seqlens([0, first + 1, *rest, request.total_seqlen])


@dataclass(frozen=True, order=True)
class Document:
    """Some tokens of a microbatch."""

    length: int
    start: int
    end: int


def tile_of_longest(request: MaskRequest) -> AttnMask:
    """The last queries of the longest document do not see the keys before them."""
    return _without_tile_of(max(_documents(request)), request)


def tile_of_shortest(request: MaskRequest) -> AttnMask:
    """The same in the shortest document that has such a tile."""
    fitting = [document for document in _documents(request) if document.length >= 2 * TILE]
    return _without_tile_of(min(fitting, default=max(_documents(request))), request)


def _documents(request: MaskRequest) -> list[Document]:
    return [Document(end - start, start, end) for start, end in pairwise(request.bounds)]


def _without_tile_of(document: Document, request: MaskRequest) -> AttnMask:
    """Causal documents, of which this one lacks its last tile beside the diagonal."""
    if document.length < 2 * TILE:
        return masks.from_cu_seqlens(list(request.bounds))
    whole = [[a, b, a, b] for a, b in pairwise(request.bounds) if a != document.start]
    query = document.end - TILE
    cut = _around(document.start, document.end, query, query - TILE, TILE)
    return _causal([*whole, *cut], request.total_seqlen)


def _around(start: int, end: int, query: int, key: int, size: int) -> list[list[int]]:
    """Rectangles of a document around the square of this many queries and keys."""
    below = query + size
    return [[start, query, start, query], [query, below, start, key],
            [query, below, key + size, below], [below, end, start, end]]  # fmt: skip


def _causal(parts: list[list[int]], total: int) -> AttnMask:
    """These rectangles, each up to the diagonal; empty ones are left out."""
    kept = [[*part, -total, 0] for part in parts if part[0] < part[1] and part[2] < part[3]]
    return _mask(kept, total)


def _mask(slices: list[list[int]], total: int) -> AttnMask:
    return AttnMask(np.array(slices, dtype=np.int32), total, total)
