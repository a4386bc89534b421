"""Contexts of quantization, which is never on here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class FP8GlobalStateManager:
    """The answer to whether quantization is on."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """No."""
        return False

    @classmethod
    def reset(cls) -> None:
        """There is no state."""


@contextlib.contextmanager
def fp8_autocast(enabled: bool = False, **settings: Any) -> Iterator[None]:
    """A context that refuses to quantize."""
    _refuse(enabled)
    yield


@contextlib.contextmanager
def fp8_model_init(enabled: bool = False, **settings: Any) -> Iterator[None]:
    """A context that refuses to make quantized weights."""
    _refuse(enabled)
    yield


def _refuse(enabled: bool) -> None:
    if enabled:
        raise NotImplementedError(
            "the stand-in for TransformerEngine requires enabled=False, got True; leave fp8 out of "
            "tests that run on it"
        )
