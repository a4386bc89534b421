"""Finding the GPTModel chunks in what training code calls a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule


def model_chunks(model: Any) -> Iterator[Any]:
    """Every model chunk in a model or list of them, without its DDP and precision wrappers.

    Raises:
        TypeError: nothing in `model` is a Megatron language model.
    """
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        inner = chunk
        while not isinstance(inner, LanguageModule):
            if not hasattr(inner, "module"):
                raise TypeError(
                    f"a Megatron language model (GPTModel), or a list of its chunks, is required, "
                    f"got {type(chunk).__name__}; pass the model that training runs"
                )
            inner = inner.module
        yield inner
