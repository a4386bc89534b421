"""Variables for TransformerEngine's attention, under our switch."""

from __future__ import annotations

import os

import pytest

from megatron_magi.config import MagiConfig
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.session import LauncherState
from megatron_magi.launcher.settings import change_settings, take_settings
from tests.launcher.few_arguments import arguments
from tests.launcher.test_settings import NO_MASK


def test_the_choice_of_another_attention_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FLASH", "0"), ("FUSED", "1"), ("UNFUSED", "0")):
        monkeypatch.setenv(f"NVTE_{name}_ATTN", value)
    (line,) = change_settings(arguments(calculate_per_token_loss=True, **NO_MASK))
    assert line.startswith("NVTE_FLASH_ATTN, NVTE_UNFUSED_ATTN are unset: attention is magi's")
    assert [n for n in ("FLASH", "FUSED", "UNFUSED") if f"NVTE_{n}_ATTN" in os.environ] == ["FUSED"]
    assert change_settings(arguments(calculate_per_token_loss=True, **NO_MASK)) == []


@pytest.mark.parametrize(("value", "wanted"), [("0", True), ("1", False), (None, False)])
def test_the_word_for_transformer_engine_counts_for_ours(
    value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    if value is not None:
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", value)
    launch = LauncherState(LauncherOptions(MagiConfig()))
    take_settings(launch, arguments())
    assert launch.options.config.deterministic is wanted
