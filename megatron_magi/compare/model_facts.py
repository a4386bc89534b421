"""Facts of a run's model: what its recipe.yaml or the arguments that Megatron logged say of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_magi.compare.run_error import RunError


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a run's model that gates need."""

    dtype: str
    """bf16, fp16 or fp32."""
    vocab_size: int
    """Rows of the padded embedding, over which an untrained model spreads its probability."""
    logit_variance: float
    """Variance of an untrained model's logits: hidden_size * init_std^2, as its last norm gives
    rows of RMS 1."""

    @property
    def untrained_loss(self) -> float:
        """Nats: ln(vocabulary) + half the variance, the mean of ln(sum(exp)) of normal logits."""
        return math.log(self.vocab_size) + self.logit_variance / 2


def facts_of_arguments(arguments: Mapping[str, str]) -> ModelFacts | None:
    """Facts of Megatron's logged arguments; None if they lack some."""
    try:
        width, std = int(arguments["hidden_size"]), float(arguments["init_method_std"])
        vocab_size = int(arguments["padded_vocab_size"])
    except (KeyError, ValueError):
        return None
    dtype = next((name for name in ("bf16", "fp16") if arguments.get(name) == "True"), "fp32")
    return ModelFacts(dtype, vocab_size, width * std**2)


def read_recipe_facts(folder: Path) -> ModelFacts | None:
    """Facts of the recipe.yaml beside a steps.csv; None if it is missing.

    Raises:
        RunError: it is broken, or PyYAML is not installed.
    """
    path = folder / "recipe.yaml"
    if not path.is_file():
        return None
    try:
        import yaml
    except ImportError as error:
        raise RunError(
            f"reading {path} needs PyYAML, which is not installed ({error}); pip install pyyaml"
        ) from error
    try:
        recipe = yaml.safe_load(path.read_text())
        model, train = recipe["model"], recipe.get("train") or {}
        rows, multiple = int(model["vocab_size"]), int(model.get("vocab_multiple", 128))
        variance = int(model["hidden_size"]) * float(model.get("init_std", 0.02)) ** 2
        dtype = str(train.get("dtype", "fp32"))
    except Exception as error:
        raise RunError(
            f"a run's recipe.yaml must be the one that training wrote, got {path}: {error!r}; "
            f"mend or remove it"
        ) from None
    return ModelFacts(dtype, -(-rows // multiple) * multiple, variance)
