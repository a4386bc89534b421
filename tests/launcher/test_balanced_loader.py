"""Data loaders whose steps are dealt by cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import megatron_magi.launcher  # noqa: F401  prepares megatron before it is imported
from megatron_magi.config import MagiConfig
from megatron_magi.launcher import balanced_loader
from megatron_magi.launcher.balanced_loader import wrap_data_loader
from megatron_magi.launcher.flags import LauncherOptions
from tests.launcher.one_rank import launch_of
from tests.launcher.test_step_balance import Data


def loaded(sampler: Any, dataset: Any = None, **options: Any) -> Any:
    launch = launch_of(8, sft=True)
    launch.options = LauncherOptions(MagiConfig(), **options)
    loader = None if sampler is None else SimpleNamespace(batch_sampler=sampler)
    return wrap_data_loader(lambda dataset, consumed_samples: loader, launch)(dataset or Data(), 0)


def test_loaders_without_steps_stay() -> None:
    whole = type("MegatronFullValidationSampler", (), {})()
    assert loaded(whole, balance_step=True).batch_sampler is whole
    assert loaded(None, balance_step=True) is None
    with pytest.raises(TypeError, match="--magi-balance-step requires Megatron's batch samplers, "):
        loaded(object(), balance_step=True)
    original = object()
    assert wrap_data_loader(original, launch_of(8)) is original, "no hook without the flag"


@pytest.mark.parametrize(("split", "micro"), [("valid", 1), ("valid", 2), ("train", 2)])
def test_joined_conversations_are_validated_in_the_order_of_megatron(
    split: str, micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron takes means of their microbatches."""
    monkeypatch.setattr(balanced_loader, "_balanced", lambda *given: "dealt")
    monkeypatch.setattr(balanced_loader, "document_lengths", lambda *given: None)
    sampler = type("MegatronPretrainingSampler", (), {"micro_batch_size": micro})()
    data = SimpleNamespace(index_split=balanced_loader.Split[split])
    got = loaded(sampler, data, balance_step=True).batch_sampler
    assert got is sampler if (split, micro) == ("valid", 2) else got == "dealt"
