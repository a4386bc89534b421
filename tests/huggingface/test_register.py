"""Registering, and what it says without Transformers."""

from __future__ import annotations

import sys

import pytest

from megatron_magi.huggingface import NAME, register


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        register()


def test_both_registries_know_the_name() -> None:
    transformers = pytest.importorskip("transformers")
    register()
    assert NAME in transformers.AttentionInterface._global_mapping
    assert NAME in transformers.AttentionMaskInterface._global_mapping


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    monkeypatch.setattr(masking, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match="take q_length"):
        register()
