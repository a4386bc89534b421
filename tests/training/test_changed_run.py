"""What a run that goes on from a checkpoint must not change, and what it says of other changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_magi.config import CostTable, MagiConfig
from megatron_magi.training.checkpoint.checkpoint_folder import (
    OF_THE_FUNCTION,
    OF_THE_ORDER,
    Checkpoint,
    changed_order,
    changes,
    choose_checkpoint,
    interrupted_group,
)
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from tests.training.small_checkpoints import change, config_of, write


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    return partial(config_of, tmp_path)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("model", "hidden_size", 256),
        ("model", "vocab_size", 300),
        ("model", "tie_embeddings", False),
        ("train", "dtype", "bf16"),
        ("parallel", "distributed_optimizer", True),
    ],
)
def test_what_must_not_change(
    config: Callable[..., RunConfig], section: str, field: str, value: Any
) -> None:
    write(config(), 1)
    other = config(**{section: {field: value}})
    with pytest.raises(RecipeError, match=rf"{section}.{field} {value} \(saved: .*load=null"):
        choose_checkpoint(other)


def test_changed_data_is_noted(config: Callable[..., RunConfig]) -> None:
    write(config(), 1)
    later = config(train={"seed": 5}, model={"rotary_base": 500000})
    found = choose_checkpoint(later).checkpoint
    assert isinstance(found, Checkpoint)
    assert changes(found, later, OF_THE_ORDER) == ["train.seed: 1234 before, 5 now"]
    assert changes(found, dataclasses.replace(later, train=config().train), OF_THE_ORDER) == []


@pytest.mark.parametrize(
    ("before", "now", "is_noted"),
    [
        ("a" * 64, "b" * 64, True),
        ("a" * 64, "a" * 64, False),
        (None, "b" * 64, False),  # an earlier version
        ("a" * 64, None, False),
    ],
)
def test_other_data_at_the_same_path_is_noted(
    config: Callable[..., RunConfig], before: str | None, now: str | None, is_noted: bool
) -> None:
    write(config(), 1, before)
    found = choose_checkpoint(config()).checkpoint
    assert isinstance(found, Checkpoint)
    said = f"the data at x: sha256 {'a' * 12} before, {'b' * 12} now"
    assert changed_order(found, config(), now) == ([said] if is_noted else [])


def test_data_at_another_path_is_noted_once(config: Callable[..., RunConfig]) -> None:
    write(config(), 1, "a" * 64)
    later = config(data={"path": "y"})
    found = choose_checkpoint(later).checkpoint
    assert isinstance(found, Checkpoint)
    assert changed_order(found, later, "b" * 64) == ["data.path: x before, y now"]


def test_what_changes_the_function_is_noted(config: Callable[..., RunConfig]) -> None:
    write(config(), 1)
    later = config(model={"rotary_base": 500000, "norm_epsilon": 1e-6})
    later = dataclasses.replace(later, data=dataclasses.replace(later.data, mask="causal"))
    found = choose_checkpoint(later).checkpoint
    assert isinstance(found, Checkpoint)
    assert changes(found, later, OF_THE_FUNCTION) == [
        "model.rotary_base: 10000 before, 500000 now",
        "model.norm_epsilon: 1e-05 before, 1e-06 now",
        "data.mask: document before, causal now",
    ]
    assert changes(found, config(), OF_THE_FUNCTION) == []
    del found.recipe["model"]["rotary_base"]  # an earlier version wrote none
    assert len(changes(found, later, OF_THE_FUNCTION)) == 2


@pytest.mark.parametrize(
    ("before", "now", "iteration", "is_noted"),
    [
        ({"balance_steps": 4}, {"balance_steps": 4}, 3, False),
        ({"balance_steps": 4}, {"balance_steps": 2}, 3, True),
        ({"balance_steps": 4}, {}, 3, True),
        ({}, {"balance_steps": 4}, 3, True),
        ({"balance_steps": 1}, {}, 3, False),
        ({"balance_steps": 4}, {"balance_steps": 2}, 4, False),
        ({"balance_steps": 4}, {"balance_steps": 8}, 4, True),
    ],
)
def test_steps_that_exchanged_samples_are_noted_if_others_do_now(
    config: Callable[..., RunConfig],
    before: dict[str, int],
    now: dict[str, int],
    iteration: int,
    is_noted: bool,
) -> None:
    write(config(data={"path": "x", **before}), iteration)
    later = config(data={"path": "x", **now})
    found = choose_checkpoint(later).checkpoint
    assert isinstance(found, Checkpoint)
    note = interrupted_group(found, later)
    assert (note is not None) == is_noted
    assert note is None or f"{8 * iteration} samples end inside a group" in note


def test_another_batch_inside_a_group_of_steps_is_noted(config: Callable[..., RunConfig]) -> None:
    data = {"path": "x", "balance_steps": 4}
    write(config(data=data), 3)
    later = config(data=data, train={"global_batch_size": 4})
    found = choose_checkpoint(later).checkpoint
    assert isinstance(found, Checkpoint)
    note = interrupted_group(found, later)
    assert note is not None and "(train.global_batch_size: 8 before, 4 now)" in note


@pytest.mark.parametrize("steps", [4, 1, None])
@pytest.mark.parametrize(
    ("section", "changed", "text"),
    [
        ("data", {"mask": "causal"}, "data.mask: document before, causal now"),
        ("data", {"window": 8}, "data.window: None before, 8 now"),
        (
            "data",
            {"mask": "block_causal", "block_tokens": 8, "block_window": 2},
            "data.mask: document before, block_causal now; data.block_tokens: None before, 8 now; "
            "data.block_window: None before, 2 now",
        ),
        ("data", {"moved_boundary": 1}, "data.moved_boundary: 0 before, 1 now"),
        ("magi", {"tile_q": 64}, "magi.costs.tile_q: 128 before, 64 now"),
        ("magi", {"tile_k": 64}, "magi.costs.tile_k: 128 before, 64 now"),
        ("magi", {"kernel_tflops": 100.0}, None),
    ],
)
def test_what_changes_the_order_by_cost_is_noted_inside_a_group(
    config: Callable[..., RunConfig],
    steps: int | None,
    section: str,
    changed: dict[str, Any],
    text: str | None,
) -> None:
    """The costs of samples decide their steps: other costs, other steps."""
    before = config(data={"path": "x", "balance_steps": steps})
    write(before, 3)
    found = choose_checkpoint(before).checkpoint
    assert isinstance(found, Checkpoint) and interrupted_group(found, before) is None
    if section == "data":
        later = dataclasses.replace(before, data=dataclasses.replace(before.data, **changed))
    else:
        magi = MagiConfig(costs=CostTable(**changed))
        later = dataclasses.replace(before, magi=magi)
    note = interrupted_group(found, later)
    if steps != 4 or text is None:
        assert note is None
    else:
        assert note is not None and f"({text})" in note


def test_a_checkpoint_of_an_earlier_version_exchanged_no_samples(
    config: Callable[..., RunConfig],
) -> None:
    change(write(config(), 3), lambda facts: facts["recipe"]["data"].pop("balance_steps"))
    found = choose_checkpoint(config()).checkpoint
    assert isinstance(found, Checkpoint) and interrupted_group(found, config()) is None
