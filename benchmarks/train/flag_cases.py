"""The runs of docs/convergence_protocol.md: Megatron's script with TransformerEngine's layers.

A run is `pretrain_gpt.py` with flags. Controls have one error; the masks of three of them are
functions for `--magi-mask`, and the errors of the others are made by flag_rank.py.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.train.pretrain_cases import MAGI, Flags, layout
from benchmarks.train.pretrain_te import CUDNN, DETERMINISTIC, REPEATABLE, TE, TENSORWISE
from megatron_magi import AttnMask, masks
from megatron_magi.launcher.documents import MaskRequest

STEPS, CONTROL_STEPS, SAVED_AT = 400, 60, 200
"""Steps of a run and of a control, and the step whose checkpoint gradients are compared at."""
FP8_STEPS = 300
"""Steps of a run whose linear layers compute in fp8."""
EOD = 32767
"""The token that ends a file; with it the vocabulary has 32,768."""
BUCKETS = (512, 2048, 8192)
"""Where the buckets of positions end."""

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
    "global-batch-size": 4,
    "train-iters": STEPS,
    "lr": 1e-4,
    "min-lr": 1e-5,
    "lr-decay-style": "cosine",
    "lr-warmup-iters": 40,
    "lr-decay-iters": STEPS,
}
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
WEIGHTS_ALONE: Flags = {"no-save-optim": True, "no-save-rng": True}
TILE = 128


@dataclass(frozen=True)
class Run:
    """One run of the script on two GPUs."""

    name: str
    flags: Flags
    """What it gets beside the data."""
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
    """The three stock runs and three of ours."""
    base = {**TE, "split": None, **MODEL, **SCHEDULE, **layout(cp=2), **VALIDATION}
    ours = Run("magi", {**base, **MAGI})
    stock = [
        Run(f"te_{way}", {**base, **CUDNN, "cp-comm-type": way})
        for way in ("p2p", "all_gather", "a2a")
    ]
    deterministic = {**ours.flags, **DETERMINISTIC}
    return [
        *stock,
        ours,
        replace(ours, name="magi_again"),
        Run("magi_deterministic", deterministic, dict(REPEATABLE)),
    ]


def fp8_runs() -> list[Run]:
    """The same in fp8, tensorwise, but for the deterministic one; attention stays in bf16."""
    lasting = {
        "train-iters": FP8_STEPS,
        "lr-decay-iters": FP8_STEPS,
        "eval-interval": FP8_STEPS // 2,
        "exit-interval": FP8_STEPS,
    }
    return [
        replace(run, name=f"fp8_{run.name}", flags={**run.flags, **TENSORWISE, **lasting})
        for run in long_runs()
        if run.name != "magi_deterministic"
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
"""Microbatches of this process; a step has four."""


def moved_boundary(request: MaskRequest) -> AttnMask:
    """A boundary in the middle of a sample that should be none, in the first of a step's four."""
    total = request.total_seqlen
    is_first = next(_calls) % 4 == 0
    return masks.from_cu_seqlens([0, total // 2, total] if is_first else [0, total])


def shifted_diagonal(request: MaskRequest) -> AttnMask:
    """A query sees keys up to the one before it, and the first one sees itself."""
    total = request.total_seqlen
    return _mask([[0, 1, 0, 1, -total, 0], [1, total, 0, total, -total, -1]], total)


def far_tile(request: MaskRequest) -> AttnMask:
    """The last queries do not see the first keys."""
    total = request.total_seqlen
    return _without(total, total - TILE, 0)


def near_tile(request: MaskRequest) -> AttnMask:
    """Queries in the middle do not see the keys right before them."""
    middle = request.total_seqlen // 2
    return _without(request.total_seqlen, middle, middle - TILE)


def _without(total: int, query: int, key: int) -> AttnMask:
    """A causal mask without the tile of 128 queries and 128 keys that begins there."""
    end = query + TILE
    parts = [[0, query, 0, query], [query, end, 0, key], [query, end, key + TILE, end],
             [end, total, 0, total]]  # fmt: skip
    kept = [[*part, -total, 0] for part in parts if part[0] < part[1] and part[2] < part[3]]
    return _mask(kept, total)


def _mask(slices: list[list[int]], total: int) -> AttnMask:
    return AttnMask(np.array(slices, dtype=np.int32), total, total)
