"""The extension _solver: planner, schedules and calls of the CUDA library, or one clear error."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_magi import _solver as solver
else:
    from megatron_magi.requirements import check_planner

    solver = check_planner()

__all__ = ["solver"]
