"""Megatron's language models inside the wrappers that training code puts around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_magi.adapter.model_chunks import model_chunks


class Wrapper(torch.nn.Module):
    """As Float16Module and DistributedDataParallel hold their model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def chunk() -> Any:
    made = LanguageModule.__new__(LanguageModule)
    torch.nn.Module.__init__(made)
    return made


def test_wrappers_are_taken_off() -> None:
    first, second = chunk(), chunk()
    assert list(model_chunks(first)) == [first]
    assert list(model_chunks(Wrapper(Wrapper(first)))) == [first]
    assert list(model_chunks([Wrapper(first), second])) == [first, second]
    assert list(model_chunks((first,))) == [first] and list(model_chunks([])) == []


@pytest.mark.parametrize("other", [torch.nn.Linear(1, 1), Wrapper(torch.nn.Identity()), None, 3])
def test_anything_else_is_refused_by_its_name(other: Any) -> None:
    text = rf"GPTModel.*is required, got {type(other).__name__}; pass the model that training runs"
    with pytest.raises(TypeError, match=text):
        list(model_chunks(other))
    with pytest.raises(TypeError, match=text):
        list(model_chunks([chunk(), other]))
