"""Runs of docs/results/convergence_protocol.md: Megatron with TransformerEngine's layers.

A run is `pretrain_gpt.py` with flags. Controls have one error: a mask of flag_masks.py, or one that
flag_rank.py makes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.train import flag_masks
from benchmarks.train.pretrain_cases import DOCUMENTS, MAGI, Flags, layout
from benchmarks.train.pretrain_te import CUDNN, DETERMINISTIC, REPEATABLE, TE, TENSORWISE

STEPS, CONTROL_STEPS, SAVED_AT = 400, 60, 200
"""Steps of a run and of a control, and the step whose checkpoint gradients are compared at."""
FP8_STEPS = 300
"""Steps of a run whose linear layers compute in fp8."""
EOD = 32767
"""The token that ends a file; with it the vocabulary has 32,768."""
BUCKETS = (512, 2048, 8192, 32768)
"""Of positions in a document; buckets behind a sample's end stay empty."""

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
    "global-batch-size": 1,
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
    corpus: str = ""
    """Below the folder of the corpus; by default the one of source files."""

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
        Run(
            f"doc_{made.__name__}", {**short, "magi-mask": f"{flag_masks.__name__}:{made.__name__}"}
        )
        for made in (
            flag_masks.moved_by_one,
            flag_masks.tile_of_longest,
            flag_masks.tile_of_shortest,
        )
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
    """A small model on causal samples, for every seed by stock Megatron in two ways, by ours, and
    by ours with masks that a function gives: the right one, and one that lacks a block."""
    base = {**TE, "split": None, **MODEL, **SCHEDULE, **VALIDATION, **layout(cp=2)}
    base |= {**SMALL_MODEL, **PAIRED_SCHEDULE}
    kinds: dict[str, Flags] = {
        "te": {**CUDNN, "cp-comm-type": "p2p"},
        "te_a2a": {**CUDNN, "cp-comm-type": "a2a"},
        "magi": MAGI,
        "right_mask": {**MAGI, "magi-mask": f"{flag_masks.__name__}:right_mask"},
        "near_block": {**MAGI, "magi-mask": f"{flag_masks.__name__}:near_block"},
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
    wrong = [flag_masks.moved_boundary, flag_masks.shifted_diagonal, flag_masks.far_tile,
             flag_masks.near_tile]  # fmt: skip
    named = [
        Run(made.__name__, {**short, "magi-mask": f"{flag_masks.__name__}:{made.__name__}"})
        for made in wrong
    ]
    return [*named, Run("lost_gradients", short, error="lost_gradients")]
