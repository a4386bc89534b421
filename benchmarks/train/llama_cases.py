"""The runs of Llama-3 1B through its recipe: saved weights, gradients of one step, and curves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_magi import recipe

RECIPE = "llama3_1b_1gpu"
MASKS = "benchmarks.train.flag_masks"
ONE_STEP = (
    *("--train-iters", "1", "--lr", "0", "--min-lr", "0", "--weight-decay", "0"),
    *("--lr-warmup-iters", "0", "--eval-iters", "0"),
    *("--optimizer", "sgd", "--sgd-momentum", "0"),
)
"""Adam's states would need 10 GB that no gradient depends on."""
NOT_WITH_SGD = {"--use-distributed-optimizer", "--overlap-param-gather"}
KEPT_WEIGHTS = ("--no-save-optim", "--no-save-rng", "--save-interval", "100000")
FAIR = ("--no-create-attention-mask-in-dataloader", "--calculate-per-token-loss")
"""What the flag sets in a job, given to stock too."""
CUDNN, FA3 = ("--attention-backend", "fused", *FAIR), ("--attention-backend", "flash", *FAIR)
LOCAL = (
    *("--transformer-impl", "local", "--no-persist-layer-norm"),
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
"""Megatron's own layers, in fp32: TransformerEngine's products may use TF32. Without recomputing,
one sample needs more than half of an 80 GB GPU."""
TRUTH = ("--attention-backend", "unfused", *LOCAL, *FAIR)
MAGI = ("--attention-backend", "magi")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
CP4, TP2_CP2 = ("--context-parallel-size", "4"), ("--context-parallel-size", "2", *TP2)
FP32_MAGI = (*MAGI, "--magi-kernel", "reference", *LOCAL)
CONTROLS = {
    "late": "moved_by_one",
    "long_tile": "tile_of_longest",
    "short_tile": "tile_of_shortest",
    "far_keys": "first_keys",
}
"""Masks with one error, by the name of the run."""
LOST = "benchmarks.train.lost_gradients"
"""In place of megatron_magi.run: the first context-parallel rank loses what others send it."""
WHOLE_BF16, SHARDED_BF16, ANY_FP32 = 0.42, 0.3, 0.24
"""Parts of an 80 GB GPU that one rank needs, for steps that nobody times: 33, 22 and 18 GB."""


@dataclass(frozen=True)
class Case:
    """One run of the packaged pretrain script."""

    name: str
    flags: tuple[str, ...]
    gpus: int = 1
    part: float = 1.0
    """Of each GPU's memory; runs share a GPU up to 1."""
    is_fp32: bool = False
    draws_weights: bool = False
    """Others load them: a tensor-parallel rank draws others."""
    saves: bool = True
    """Its weights at the end, and its gradients."""
    recipe: str | None = None
    """None: that of all runs."""
    launcher: str = "megatron_magi.run"
    environment: dict[str, str] = field(default_factory=dict)

    def words(self, base: list[str], folder: Path, weights: Path | None) -> list[str]:
        """The script's flags.

        Args:
            base: of the recipe and the data.
            folder: of this run.
            weights: a checkpoint to begin at; None: weights are drawn.
        """
        left_out = {"--bf16"} if self.is_fp32 else set()
        left_out |= NOT_WITH_SGD if "sgd" in self.flags else set()
        words = [word for word in base if word not in left_out]
        words += self.flags
        if self.saves:
            words += ["--save", str(folder / "save"), *KEPT_WEIGHTS]
        words += ["--tensorboard-dir", str(folder), "--log-timers-to-tensorboard"]
        if weights is not None:
            words += ["--load", str(weights), "--finetune", "--no-load-optim", "--no-load-rng"]
        return words


def weights() -> list[Case]:
    """One step at rate 0, after which the drawn weights are saved as bf16 has them."""
    return [Case("weights", (*CUDNN, *ONE_STEP), draws_weights=True)]


def gradients() -> list[Case]:
    """Gradients of one step, all from the same weights and samples: the truth, stock by its two
    kernels, the flag in its layouts, and controls, each compared with the truth with its error."""
    saved = (*ONE_STEP, "--save-wgrads-interval", "1")
    truth = (*TRUTH, "--spec", "benchmarks.train.fp32_spec", "layer_spec")
    return [
        Case("fp32", (*truth, *saved), 1, ANY_FP32, is_fp32=True),
        Case("cudnn", (*CUDNN, *saved), 1, WHOLE_BF16),
        Case("fa3", (*FA3, *saved), 1, WHOLE_BF16),
        Case("magi_cp1", (*MAGI, *saved), 1, WHOLE_BF16),
        *_controls(saved),
        Case("cudnn_tp2", (*CUDNN, *TP2, *saved), 2, SHARDED_BF16),
        Case("magi_tp2_cp2", (*MAGI, *TP2_CP2, *saved), 4, SHARDED_BF16),
        Case("magi_cp4", (*MAGI, *CP4, *saved), 4, SHARDED_BF16),
        Case("magi_cp4_deterministic", (*MAGI, *CP4, "--magi-deterministic", *saved), 4,
             SHARDED_BF16),
    ]  # fmt: skip


def _controls(saved: tuple[str, ...]) -> list[Case]:
    """Pairs: in fp32, and by the flag at CP 4."""
    cases = []
    for name, function in CONTROLS.items():
        mask = ("--magi-mask", f"{MASKS}:{function}")
        cases.append(Case(f"fp32_{name}", (*FP32_MAGI, *mask, *saved), 1, ANY_FP32, is_fp32=True))
        cases.append(Case(f"magi_{name}", (*MAGI, *CP4, *mask, *saved), 4, SHARDED_BF16))
    lost = {"launcher": LOST}
    cases.append(Case("fp32_lost", (*FP32_MAGI, *CP4, *saved), 4, ANY_FP32, is_fp32=True, **lost))
    cases.append(Case("magi_lost", (*MAGI, *CP4, *saved), 4, SHARDED_BF16, **lost))
    return cases


STEPS = 300
CURVE = (
    *("--train-iters", str(STEPS), "--lr", "4e-5", "--min-lr", "4e-6", "--adam-beta2", "0.95"),
    *("--lr-warmup-iters", "100", "--lr-decay-iters", str(STEPS), "--global-batch-size", "16"),
    *("--eval-interval", str(STEPS), "--eval-iters", "8"),
)
JOINED = ("--micro-batch-size", "4")


def curves() -> list[Case]:
    """Stock at DP 4 and the flag in three layouts, in turns: the same samples in each step."""
    dp2_cp2 = ("--context-parallel-size", "2", "--micro-batch-size", "2")
    return [
        Case("stock_cudnn_1", (*CUDNN, *CURVE), 4),
        Case("flag_cp4", (*JOINED, *CURVE), 4, saves=False, recipe="llama3_1b_cp4"),
        Case("stock_fa3", (*FA3, *CURVE), 4, saves=False),
        Case("flag_tp2_cp2", (*MAGI, *TP2_CP2, *JOINED, *CURVE), 4, saves=False),
        Case("stock_cudnn_2", (*CUDNN, *CURVE), 4, saves=False),
        Case("flag_dp2_cp2", (*MAGI, *dp2_cp2, *CURVE), 4, saves=False),
    ]


def controls() -> list[Case]:
    """The first 60 steps of flag_cp4 with one error each: which errors do curves show?"""
    begun = (*MAGI, *CP4, *JOINED, *CURVE, "--exit-interval", "60")
    cases = [
        Case(f"curve_{name}", (*begun, "--magi-mask", f"{MASKS}:{function}"), 4, saves=False)
        for name, function in CONTROLS.items()
    ]
    return [*cases, Case("curve_lost", begun, 4, saves=False, launcher=LOST)]


def held_out() -> list[Case]:
    """Held-out loss of one checkpoint by stock and by the flag, without training."""
    once = ("--skip-train", "--train-iters", str(STEPS), "--global-batch-size", "16")
    once += ("--eval-interval", str(STEPS), "--eval-iters", "8")
    return [
        Case("held_cudnn", (*CUDNN, *once), 1, WHOLE_BF16, saves=False),
        Case("held_fa3", (*FA3, *once), 1, WHOLE_BF16, saves=False),
        Case("held_magi_cp1", (*MAGI, *once), 1, WHOLE_BF16, saves=False),
        Case("held_magi_cp4", (*MAGI, *CP4, *once), 4, SHARDED_BF16, saves=False),
    ]


GROUPS = {
    "weights": weights,
    "gradients": gradients,
    "curves": curves,
    "controls": controls,
    "held_out": held_out,
}


def base_flags(name: str, data: str, more: list[str]) -> list[str]:
    """Flags of the recipe, of the data, and those that the command line adds."""
    words = recipe.expand(["--recipe", name])
    return [*words, *(["--mock-data"] if data == "mock" else ["--data-path", data]), *more]
