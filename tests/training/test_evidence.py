"""A run's folder as evidence: facts of its recipe, its gradient errors, and what is not finite."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.training.parity.baseline import Baseline
from megatron_magi.training.parity.evidence import (
    Evidence,
    RecipeFacts,
    read_evidence,
    read_recipe_facts,
)
from megatron_magi.training.parity.gradient_errors import GradientError
from megatron_magi.training.recipe.recipe_error import RecipeError
from tests.cli.compare_runs import PARAMETERS, write_beside_curve
from tests.training.evidence import curves

NAN, INF = math.nan, math.inf


def recipe(folder: Path, text: str) -> Path:
    (folder / "recipe.yaml").write_text(text)
    return folder


def test_facts_of_a_recipe_and_the_defaults_of_what_it_lacks(tmp_path: Path) -> None:
    assert read_recipe_facts(tmp_path) is None
    short = read_recipe_facts(recipe(tmp_path, "model: {vocab_size: 300, hidden_size: 50}\n"))
    assert short == RecipeFacts("fp32", 384, 50 * 0.02**2)
    model = "{vocab_size: 300, vocab_multiple: 50, hidden_size: 50, init_std: 0.1}"
    full = read_recipe_facts(recipe(tmp_path, f"model: {model}\ntrain: {{dtype: bf16}}\n"))
    assert full == RecipeFacts("bf16", 300, 50 * 0.1**2)


def test_an_untrained_loss_is_that_of_normal_logits() -> None:
    """The mean of ln(sum(exp)) over many draws, less the mean logit, which is 0."""
    facts = RecipeFacts("fp32", 2000, 0.3)
    logits = np.random.RandomState(0).normal(0, math.sqrt(0.3), (200, 2000))
    drawn = np.log(np.exp(logits).sum(1)).mean()
    assert facts.untrained_loss == pytest.approx(drawn, abs=2e-3)


@pytest.mark.parametrize(
    "text", ["model: [\n", "- a\n", "{}\n", "model: {vocab_size: many, hidden_size: 8}\n"]
)
def test_a_broken_recipe_is_one_clear_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match=r"must be the one that training wrote, got .*recipe\.y"):
        read_recipe_facts(recipe(tmp_path, text))


def test_without_omegaconf_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    assert read_recipe_facts(tmp_path) is None
    with pytest.raises(RecipeError, match=r"pip install 'megatron-magi\[train\]'"):
        read_recipe_facts(recipe(tmp_path, "model: {}\n"))


def test_a_run_is_measured_beside_the_baseline_and_the_baseline_is_not(tmp_path: Path) -> None:
    plain = write_beside_curve(tmp_path, "plain", gradients=0.0)
    other = write_beside_curve(tmp_path, "other", gradients=0.1)
    found = read_evidence(other, Baseline((plain,)))
    assert found.curves.name == "other" and found.recipe == RecipeFacts("bf16", 384, 16 * 0.02**2)
    assert {e.parameter for e in found.gradients} == set(PARAMETERS)
    assert [e.relative_error for e in found.gradients] == pytest.approx([0.1] * len(PARAMETERS))
    assert read_evidence(plain, Baseline((plain,))).gradients == []


def test_every_kind_of_value_is_counted_if_it_is_not_finite() -> None:
    whole = curves("run", np.ones(3), validation={2: 1.0})
    assert Evidence(whole, None, []).num_not_finite == 0
    broken = curves("run", np.array([1.0, NAN, INF]), validation={2: NAN})
    broken.grad_norm[:] = 1.0, INF, 1.0
    gradients = [
        GradientError(1, "w", INF, 1.0, NAN, "plain"),
        GradientError(1, "b", 1, NAN, 1, "p"),
    ]
    assert Evidence(broken, None, gradients).num_not_finite == 2 + 1 + 1 + 3
