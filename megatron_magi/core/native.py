"""The compiled C++ planner, or one clear error where it is missing."""

from __future__ import annotations

try:
    from megatron_magi import _solver as solver  # type: ignore[attr-defined]
except ImportError as error:  # pragma: no cover - only without a build
    raise ImportError(
        "megatron_magi needs its compiled planner (megatron_magi._solver), which is not there for "
        f"this Python ({error}); run `pip install -e .` in the checkout, or `pip install .`"
    ) from error

__all__ = ["solver"]
