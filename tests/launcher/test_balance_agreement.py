"""Ranks that would deal the samples of a step differently."""

from __future__ import annotations

import megatron_magi.launcher  # noqa: F401  prepares megatron before it is imported
from megatron_magi.launcher.balance_agreement import difference


def test_the_first_rank_that_differs_is_named() -> None:
    same = {"dataset": "a", "dealing": "b"}
    said = difference([{}, same, same, {"dataset": "a", "dealing": "c"}])
    assert "alike, got dealing c on rank 3 and b on rank 1, which would" in said
    assert "leave --magi-balance-step out" in said and "\n" not in said
