"""Facts of a run's model, from the arguments that Megatron logs or from a model.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

from megatron_magi.checks import integer, word
from megatron_magi.compare.run_error import RunError

MODEL = "model.json"


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

    def __post_init__(self) -> None:
        word(self.dtype, "dtype", ("bf16", "fp16", "fp32"))
        integer(self.vocab_size, "vocab_size", 1)

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


def read_facts(folder: Path) -> ModelFacts | None:
    """Facts in the model.json next to a steps.csv; None if it is missing.

    Raises:
        RunError: it is broken.
    """
    path = folder / MODEL
    if not path.is_file():
        return None
    kinds = get_type_hints(ModelFacts)
    try:
        given = json.loads(path.read_text())
        return ModelFacts(**{name: kind(given[name]) for name, kind in kinds.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{MODEL} must be an object with {', '.join(kinds)}, got {error!r} in {path}; mend or "
            f"remove it"
        ) from None
