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
)
KEPT_WEIGHTS = ("--no-save-optim", "--no-save-rng", "--save-interval", "100000")
FAIR = ("--no-create-attention-mask-in-dataloader", "--calculate-per-token-loss")
"""What the flag sets in a job, given to stock too."""
CUDNN, FA3 = ("--attention-backend", "fused", *FAIR), ("--attention-backend", "flash", *FAIR)
TRUTH = ("--attention-backend", "unfused", "--transformer-impl", "local", *FAIR)
MAGI = ("--attention-backend", "magi")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
CP4, TP2_CP2 = ("--context-parallel-size", "4"), ("--context-parallel-size", "2", *TP2)
FP32_MAGI = (*MAGI, "--magi-kernel", "reference", "--transformer-impl", "local")
CONTROLS = {
    "late": "moved_by_one",
    "long_tile": "tile_of_longest",
    "short_tile": "tile_of_shortest",
    "far_keys": "first_keys",
}
"""Masks with one error, by the name of the run."""


@dataclass(frozen=True)
class Case:
    """One run of the packaged pretrain script."""

    name: str
    flags: tuple[str, ...]
    gpus: int = 1
    is_fp32: bool = False
    saves_weights: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def words(self, base: list[str], folder: Path, weights: Path | None) -> list[str]:
        """The script's flags.

        Args:
            base: of the recipe and the data.
            folder: of this run.
            weights: a checkpoint to begin at; None: weights are drawn.
        """
        words = [word for word in base if not (self.is_fp32 and word == "--bf16")]
        words += [*self.flags, "--save", str(folder / "save"), *KEPT_WEIGHTS]
        words += ["--tensorboard-dir", str(folder), "--log-timers-to-tensorboard"]
        if weights is not None:
            words += ["--load", str(weights), "--finetune", "--no-load-optim", "--no-load-rng"]
        return words


def weights() -> list[Case]:
    """One step at rate 0, after which the drawn weights are saved as bf16 has them."""
    return [Case("weights", (*CUDNN, *ONE_STEP), saves_weights=True)]


def gradients() -> list[Case]:
    """Gradients of one step, all from the same weights and samples: the truth, stock by its two
    kernels, the flag in its layouts, and controls, each beside the truth with its error."""
    saved = (*ONE_STEP, "--save-wgrads-interval", "1")
    truth = (*TRUTH, "--spec", "benchmarks.train.fp32_spec", "layer_spec")
    cases = [
        Case("fp32", (*truth, *saved), is_fp32=True),
        Case("cudnn", (*CUDNN, *saved)),
        Case("fa3", (*FA3, *saved)),
        Case("cudnn_tp2", (*CUDNN, *TP2, *saved), 2),
        Case("magi_cp1", (*MAGI, *saved)),
        Case("magi_cp4", (*MAGI, *CP4, *saved), 4),
        Case("magi_cp4_deterministic", (*MAGI, *CP4, "--magi-deterministic", *saved), 4),
        Case("magi_tp2_cp2", (*MAGI, *TP2_CP2, *saved), 4),
    ]
    for name, function in CONTROLS.items():
        mask = ("--magi-mask", f"{MASKS}:{function}")
        cases.append(Case(f"fp32_{name}", (*FP32_MAGI, *mask, *saved), is_fp32=True))
        cases.append(Case(f"magi_{name}", (*MAGI, *CP4, *mask, *saved), 4))
    return cases


def curves(steps: int = 300) -> list[Case]:
    """Stock at DP 4 and the flag in three layouts: the same samples in each step."""
    length = (
        *("--train-iters", str(steps), "--lr", "4e-5", "--min-lr", "4e-6", "--adam-beta2", "0.95"),
        *("--lr-warmup-iters", "100", "--lr-decay-iters", str(steps), "--global-batch-size", "16"),
        *("--eval-interval", str(steps), "--eval-iters", "8"),
    )
    joined = ("--micro-batch-size", "4")
    layouts = {
        "cp4": (*CP4, *joined),
        "dp2_cp2": ("--context-parallel-size", "2", "--micro-batch-size", "2"),
        "tp2_cp2": (*TP2_CP2, *joined),
    }
    stock = [
        Case("stock_cudnn_1", (*CUDNN, *length), 4, saves_weights=True),
        Case("stock_cudnn_2", (*CUDNN, *length), 4),
        Case("stock_fa3", (*FA3, *length), 4),
    ]
    return stock + [
        Case(f"flag_{name}", (*MAGI, *flags, *length), 4) for name, flags in layouts.items()
    ]


GROUPS = {"weights": weights, "gradients": gradients, "curves": curves}


def base_flags(name: str, data: str, more: list[str]) -> list[str]:
    """Flags of the recipe, of the data, and those that the command line adds."""
    words = recipe.expand(["--recipe", name])
    return [*words, *(["--mock-data"] if data == "mock" else ["--data-path", data]), *more]
