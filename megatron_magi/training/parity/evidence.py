"""All that a run's folder says about it: curves, gradient errors, and facts of its recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_magi.training.parity.compare import RunCurves, read_run
from megatron_magi.training.parity.gradient_errors import GradientError, gradient_errors
from megatron_magi.training.recipe.config import ModelConfig, TrainConfig
from megatron_magi.training.recipe.recipe_error import RecipeError


@dataclass(frozen=True)
class RecipeFacts:
    """What gates need of a run's recipe.yaml."""

    dtype: str
    vocab_size: int
    """Padded: the rows of the embedding, over which an untrained model spreads its guess."""
    logit_variance: float
    """Of an untrained model: hidden_size * init_std^2, since its last norm gives rows of RMS 1."""

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

    @property
    def num_not_finite(self) -> int:
        """Values that are inf or nan, of everything that was recorded."""
        c = self.curves
        values = [*c.loss, *c.grad_norm, *c.validation.values()]
        values += [x for e in self.gradients for x in (e.norm, e.baseline_norm, e.relative_error)]
        return int(np.sum(~np.isfinite(np.array(values))))


def read_evidence(folder: Path, baseline: Path) -> Evidence:
    """Read a run's folder; measures gradient errors where both dumps are there.

    Raises:
        RecipeError: no steps.csv, a broken recipe.yaml, gradients that do not fit.
    """
    errors = [] if folder == baseline else gradient_errors(folder, baseline)
    return Evidence(read_run(folder), read_recipe_facts(folder), errors)


def read_recipe_facts(folder: Path) -> RecipeFacts | None:
    """Of the recipe.yaml that training leaves beside its steps.csv; None where there is none."""
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
