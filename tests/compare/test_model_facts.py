"""Facts of a run's model, from its recipe.yaml or Megatron's logged arguments."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.compare.model_facts import ModelFacts, facts_of_arguments, read_recipe_facts
from megatron_magi.compare.run_error import RunError


def recipe(folder: Path, text: str) -> Path:
    (folder / "recipe.yaml").write_text(text)
    return folder


def test_facts_of_a_recipe_and_the_defaults_of_what_it_lacks(tmp_path: Path) -> None:
    assert read_recipe_facts(tmp_path) is None
    short = read_recipe_facts(recipe(tmp_path, "model: {vocab_size: 300, hidden_size: 50}\n"))
    assert short == ModelFacts("fp32", 384, 50 * 0.02**2)
    model = "{vocab_size: 300, vocab_multiple: 50, hidden_size: 50, init_std: 0.1}"
    full = read_recipe_facts(recipe(tmp_path, f"model: {model}\ntrain: {{dtype: bf16}}\n"))
    assert full == ModelFacts("bf16", 300, 50 * 0.1**2)


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
    "text", ["model: [\n", "- a\n", "{}\n", "model: {vocab_size: many, hidden_size: 8}\n"]
)
def test_a_broken_recipe_is_one_clear_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(RunError, match=r"must be the one that training wrote, got .*recipe\.y"):
        read_recipe_facts(recipe(tmp_path, text))


def test_without_yaml_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert read_recipe_facts(tmp_path) is None
    with pytest.raises(RunError, match="pip install pyyaml"):
        read_recipe_facts(recipe(tmp_path, "model: {}\n"))
