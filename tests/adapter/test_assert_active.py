"""Every model chunk must run our attention, each of several on a rank."""

from __future__ import annotations

import pytest
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import nn

from megatron_magi.adapter.core_attention import MagiCoreAttention
from megatron_magi.adapter.plugin import assert_active


def chunk_of(core: type[nn.Module] | None, kinds: str | None = None) -> nn.Module:
    """A model chunk of one layer, whose core attention is of this class; None: it has none."""
    layer = nn.Module()
    if core is not None:
        layer.attention_type = "self"
        layer.core_attention = core.__new__(core)
        nn.Module.__init__(layer.core_attention)
    chunk = LanguageModule.__new__(LanguageModule)
    nn.Module.__init__(chunk)
    chunk.decoder = nn.Module()
    chunk.decoder.layers = nn.ModuleList([layer])
    if kinds is not None:
        chunk.decoder.layer_type_list = list(kinds)
    return chunk


def test_our_attention_in_every_chunk_is_active() -> None:
    assert_active([chunk_of(MagiCoreAttention), chunk_of(MagiCoreAttention, "*")])


@pytest.mark.parametrize("kinds", [None, "*", "+", "-+"])
def test_a_later_chunk_without_attention_is_named(kinds: str | None) -> None:
    with pytest.raises(RuntimeError, match="got 1 other: no self-attention at all"):
        assert_active([chunk_of(MagiCoreAttention), chunk_of(None, kinds)])


def test_a_chunk_of_other_layers_needs_none() -> None:
    assert_active([chunk_of(MagiCoreAttention), chunk_of(None, "M-")])


def test_another_core_attention_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"got 1 other: decoder.layers.0 \(Identity\)"):
        assert_active([chunk_of(MagiCoreAttention), chunk_of(nn.Identity)])
