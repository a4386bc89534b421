"""Facts of a run's model, from Megatron's logged arguments or its model.json."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.compare.model_facts import ModelFacts, facts_of_arguments, read_facts
from megatron_magi.compare.run_error import RunError


def test_facts_of_a_file_next_to_a_steps_csv(tmp_path: Path) -> None:
    assert read_facts(tmp_path) is None
    facts = ModelFacts("bf16", 300, 0.5)
    (tmp_path / "model.json").write_text(json.dumps(asdict(facts) | {"more": 1}))
    assert read_facts(tmp_path) == facts


def test_facts_of_logged_arguments() -> None:
    arguments = {"hidden_size": "50", "init_method_std": "0.1", "padded_vocab_size": "384"}
    assert facts_of_arguments(arguments) == ModelFacts("fp32", 384, 50 * 0.1**2)
    half = facts_of_arguments({**arguments, "bf16": "False", "fp16": "True"})
    assert half is not None and half.dtype == "fp16"
    assert facts_of_arguments({**arguments, "init_method_std": "None"}) is None
    assert facts_of_arguments({"hidden_size": "50"}) is None


def test_an_untrained_loss_is_that_of_normal_logits() -> None:
    """The mean of ln(sum(exp)) over many draws, less the mean logit, which is 0."""
    facts = ModelFacts("fp32", 2000, 0.3)
    logits = np.random.RandomState(0).normal(0, math.sqrt(0.3), (200, 2000))
    drawn = np.log(np.exp(logits).sum(1)).mean()
    assert facts.untrained_loss == pytest.approx(drawn, abs=2e-3)


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[]",
        "{}",
        '{"dtype": "bf16", "vocab_size": "many", "logit_variance": 1}',
        '{"dtype": "float32", "vocab_size": 300, "logit_variance": 1}',
        '{"dtype": "bf16", "vocab_size": 0, "logit_variance": 1}',
    ],
)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(RunError, match=r"an object with dtype, vocab_size, .*, got .*model\.json"):
        read_facts(tmp_path)
