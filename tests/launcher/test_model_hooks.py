"""Models under the launcher: what is refused when they are built or run, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType as MegatronMaskType

from megatron_magi.adapter.core_attention import MagiCoreAttention
from megatron_magi.config import MagiConfig
from megatron_magi.launcher import model_hooks
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.session import LauncherState


def attention(mask_type: MegatronMaskType) -> torch.nn.Module:
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, attention_dropout=0.0
    )
    core = MagiCoreAttention(config, 1, mask_type, "self")
    return torch.nn.ModuleDict({"core_attention": core})


@pytest.mark.parametrize("mask_type", [MegatronMaskType.causal, MegatronMaskType.padding_causal])
def test_causal_specs_are_taken(mask_type: MegatronMaskType) -> None:
    model_hooks._require_causal(attention(mask_type))


@pytest.mark.parametrize("mask_type", [MegatronMaskType.no_mask, MegatronMaskType.padding])
def test_other_specs_need_a_mask_by_name(mask_type: MegatronMaskType) -> None:
    with pytest.raises(NotImplementedError, match=r"requires causal.*at core_attention; name"):
        model_hooks._require_causal(attention(mask_type))


def test_a_model_before_its_arguments_is_refused() -> None:
    def build(self: Any, config: Any) -> None: ...

    wrapped = model_hooks.wrap_model_init(build, LauncherState(LauncherOptions(MagiConfig())))
    with pytest.raises(RuntimeError, match="requires arguments that Megatron's validate_args"):
        wrapped(SimpleNamespace(), None)


def test_a_forward_outside_a_schedule_is_refused() -> None:
    with pytest.raises(RuntimeError, match="must run inside a schedule"):
        model_hooks._plan_of_middle_stage(LauncherState(LauncherOptions(MagiConfig())), None)
