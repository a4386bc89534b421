"""Sets of runs of docs/results/convergence.md: models A, B and C, noise runs, controls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """A training run: a recipe with overrides."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    gpus: int = 1
    error: str | None = None
    """A negative control of tests/convergence/broken_train.py."""

    def command(self, data: str, work: Path) -> list[str]:
        """Its command line."""
        program = ["-m", "megatron_magi", "train"]
        if self.error is not None:
            program = ["-m", "tests.convergence.broken_train", self.error]
        place = (f"name={self.name}", f"log.dir={work}", f"data.path={data}")
        filled = [o.replace("WORK", str(work)) for o in self.overrides]
        more = ("log.progress=false", "log.overwrite=true")
        return [sys.executable, *program, self.recipe, *place, *filled, *more]


PLAIN = ("attention=flex_plain",)
SDPA = ("attention=sdpa",)
REVERSED = ("data.step_order=reversed",)
CAUSAL = ("data.mask=causal", "train.iterations=250")
CP2 = ("parallel.cp=2",)
DP2 = ("parallel.dp=2",)
NO_VALIDATION = ("validation.interval=null",)
FIRST_STEP = ("train.iterations=1", *NO_VALIDATION)
SHORT = ("train.iterations=60", *NO_VALIDATION)
SAVING = ("checkpoint.interval=300", "checkpoint.keep=null")
MakeRun = Callable[..., Run]


def all_sets() -> dict[str, list[Run]]:
    """Every set by name."""
    return model_b() | model_a() | model_c()


def model_b() -> dict[str, list[Run]]:
    """The 180M model: every comparison, fused kernels off on both sides, a curve on one GPU."""
    run = maker("b", "llama3_180m_1gpu", 500, "model.fused=off")
    return {
        "b_documents": [
            run("flex", *PLAIN, *SAVING),
            run("noise", *PLAIN, *REVERSED),
            run("noise_sdpa", *SDPA),
            run("noise_fused", *PLAIN, "model.fused=auto"),
            run("magi_cp2", *CP2, gpus=2),
            run("magi_cp1"),
        ],
        "b_again": [run("magi_cp1_again"), run("magi_cp1_reversed", *REVERSED)],
        "b_gates_300": from_step_300(run, "b_flex"),
        "b_gates_1": gates(run, "1", FIRST_STEP),
        "b_causal": [
            run("sdpa_causal", *SDPA, *CAUSAL),
            run("sdpa_causal_noise", *SDPA, *REVERSED, *CAUSAL),
            run("flex_causal_noise", *PLAIN, *CAUSAL),
            run("sdpa_causal_fused", *SDPA, *CAUSAL, "model.fused=auto"),
            run("magi_causal_cp1", *CAUSAL),
            run("magi_causal_cp2", *CAUSAL, *CP2, gpus=2),
        ],
        "b_controls": controls(run),
        "b_high_rate": high_rate(),
    }


def high_rate() -> list[Run]:
    """Model B at the learning rate at which ours failed: three baselines and three of ours."""
    rate = ("optimizer.lr=3e-4", "optimizer.min_lr=3e-5", "optimizer.warmup_iters=50")
    run = maker("b_high", "llama3_180m_1gpu", 500, "model.fused=off", *rate)
    return [
        run("magi_cp2", *CP2, gpus=2),
        run("flex", *PLAIN),
        run("noise", *PLAIN, *REVERSED),
        run("noise_sdpa", *SDPA),
        run("magi_cp1"),
        run("magi_cp1_again"),
    ]


def model_a() -> dict[str, list[Run]]:
    """The 1B model, fused kernels on both sides and one noise run without.

    At twice B's width the learning rate that does not amplify rounding is lower.
    """
    calm = ("optimizer.lr=4e-5", "optimizer.min_lr=4e-6", "optimizer.warmup_iters=100")
    run = maker("a", "llama3_1b_1gpu", 300, "train.iterations=300", *calm)
    return {
        "a_baseline": [
            run("flex", *PLAIN, *DP2, gpus=2),
            run("noise", *PLAIN, *REVERSED, *DP2, gpus=2),
        ],
        "a_ours": [run("magi_cp1", *DP2, gpus=2), run("magi_cp2", *CP2, gpus=2)],
        "a_more_noise": [run("noise_unfused", *PLAIN, *DP2, "model.fused=off", gpus=2)],
        "a_gates_300": [
            run("to_300", *PLAIN, *DP2, *SAVING, gpus=2),
            *from_step_300(run, "a_to_300"),
        ],
        "a_controls": controls(run),
    }


def model_c() -> dict[str, list[Run]]:
    """The 1B model on samples of 32,768 tokens: baseline and ours on one GPU, ours on two."""
    run = maker("c", "llama3_1b_32k_2gpu_cp2", 100, "parallel.overlap_param_gather=false")
    one = ("parallel.cp=1", "train.recompute=attention")
    return {
        "c_long": [
            run("flex", *PLAIN, *one),
            run("magi_cp1", *one),
            run("noise", *PLAIN, *REVERSED, *one),
            run("noise_sdpa_1", *SDPA, *one, *FIRST_STEP),
            run("magi_cp2", gpus=2),
        ]
    }


def maker(model: str, recipe: str, steps: int, *common: str) -> MakeRun:
    """run(name, overrides..., gpus=1, error=None) of a model; one schedule for every length."""
    always = (
        *("parallel.distributed_optimizer=true", f"optimizer.decay_iters={steps}"),
        *("train.dump_gradients=[1]", *common),
    )

    def run(name: str, *more: str, gpus: int = 1, error: str | None = None) -> Run:
        return Run(f"{model}_{name}", recipe, (*always, *more), gpus, error)

    return run


def controls(run: MakeRun) -> list[Run]:
    """Sixty steps of the baseline, of a noise run and of every negative control."""
    pair = [run("short_flex", *PLAIN, *SHORT), run("short_noise", *PLAIN, *REVERSED, *SHORT)]
    moved = [run(f"control_moved_{n}", f"data.moved_boundary={n}", *SHORT) for n in (1, 16, 256)]
    tiles = [run(f"control_{error}", *SHORT, error=error) for error in ("tile", "tile_of_longest")]
    return [*pair, *moved, *tiles, run("control_partial", *CP2, *SHORT, gpus=2, error="partial")]


def from_step_300(run: MakeRun, baseline: str) -> list[Run]:
    """Step 301 of every kind of run, from the baseline's checkpoint."""
    start = (
        *(f"checkpoint.load=WORK/{baseline}/checkpoints/iter_0000300", "train.iterations=301"),
        *("train.dump_gradients=[301]", *NO_VALIDATION),
    )
    return gates(run, "300", start)


def gates(run: MakeRun, when: str, start: tuple[str, ...]) -> list[Run]:
    """One step of baseline, noise runs, ours and the controls from a common state."""
    kinds: list[tuple[str, tuple[str, ...], str | None]] = [
        ("flex", PLAIN, None),
        ("noise", (*PLAIN, *REVERSED), None),
        ("sdpa", SDPA, None),
        ("magi_cp1", (), None),
        ("moved_1", ("data.moved_boundary=1",), None),
        ("moved_16", ("data.moved_boundary=16",), None),
        ("moved_256", ("data.moved_boundary=256",), None),
        ("tile", (), "tile"),
        ("tile_of_longest", (), "tile_of_longest"),
    ]
    single = [run(f"{when}_{name}", *start, *more, error=error) for name, more, error in kinds]
    cp2 = [("magi_cp2", None), ("partial", "partial")]
    return [*single, *(run(f"{when}_{n}", *start, *CP2, gpus=2, error=e) for n, e in cp2)]
