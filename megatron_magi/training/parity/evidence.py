"""Reads a run's folder: curves, gradient errors, and facts of its recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_magi.training.parity.baseline import Baseline
from megatron_magi.training.parity.differences import RunCurves, read_run
from megatron_magi.training.parity.gradient_errors import GradientError, gradient_errors
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_values import ModelConfig, TrainConfig


@dataclass(frozen=True)
class RecipeFacts:
    """The facts of a run's recipe.yaml that gates need."""

    dtype: str
    vocab_size: int
    """Rows of the padded embedding, over which an untrained model spreads its probability."""
    logit_variance: float
    """Variance of an untrained model's logits: hidden_size * init_std^2, as its last norm gives
    rows of RMS 1."""

    @property
    def untrained_loss(self) -> float:
        """Nats: ln(vocabulary) + half the variance, the mean of ln(sum(exp)) of normal logits."""
        return math.log(self.vocab_size) + self.logit_variance / 2


@dataclass(frozen=True)
class Evidence:
    """A run, and its gradients beside the baseline's."""

    curves: RunCurves
    recipe: RecipeFacts | None
    """None: the folder has no recipe.yaml."""
    gradients: list[GradientError]

    def first(self, num_steps: int) -> Evidence:
        """The same run up to step ``num_steps``."""
        end = self.curves.first_iteration + num_steps
        known = [error for error in self.gradients if error.iteration < end]
        return replace(self, curves=self.curves.first(num_steps), gradients=known)

    @property
    def num_not_finite(self) -> int:
        """Number of recorded values that are inf or nan."""
        c = self.curves
        values = [*c.loss, *c.grad_norm, *c.validation.values(), *c.by_position.values()]
        values += [x for e in self.gradients for x in (e.norm, e.baseline_norm, e.relative_error)]
        return int(np.sum(~np.isfinite(np.array(values))))


def read_evidence(folder: Path, baseline: Baseline) -> Evidence:
    """Read a run's folder, and measure gradient errors if both dumps exist.

    Raises:
        RecipeError: no steps.csv, a broken recipe.yaml, or gradients that do not fit.
    """
    errors = [] if baseline.runs == (folder,) else gradient_errors(folder, baseline)
    return Evidence(read_run(folder), read_recipe_facts(folder), errors)


def read_recipe_facts(folder: Path) -> RecipeFacts | None:
    """Facts of the recipe.yaml that training writes beside its steps.csv; None if it is missing."""
    path = folder / "recipe.yaml"
    if not path.is_file():
        return None
    try:
        from omegaconf import OmegaConf
    except ImportError as error:
        raise RecipeError(
            "reading a run's recipe.yaml needs omegaconf, which is not installed; "
            "run pip install 'megatron-magi[train]'"
        ) from error
    try:
        recipe = OmegaConf.load(path)
        model = ModelConfig(
            vocab_size=int(OmegaConf.select(recipe, "model.vocab_size")),
            vocab_multiple=int(OmegaConf.select(recipe, "model.vocab_multiple", default=128)),
            hidden_size=int(OmegaConf.select(recipe, "model.hidden_size")),
            init_std=float(OmegaConf.select(recipe, "model.init_std", default=0.02)),
        )
        dtype = str(OmegaConf.select(recipe, "train.dtype", default=TrainConfig.dtype))
    except Exception as error:
        raise RecipeError(
            f"a run's recipe.yaml must be the one that training wrote, got {path}: {error}; "
            f"mend or remove it"
        ) from None
    return RecipeFacts(dtype, model.padded_vocab_size, model.hidden_size * model.init_std**2)
