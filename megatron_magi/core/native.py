"""The compiled C++ planner, or one clear error where it is missing."""

from __future__ import annotations

from megatron_magi.requirements import check_planner

solver = check_planner()

__all__ = ["solver"]
