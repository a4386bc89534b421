"""LPT and search against every assignment there is: the cap, the fewest rows, any budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.plan.small_problems import SmallProblem

SIZES = [(8, 2), (10, 2), (6, 3), (9, 3), (8, 4)]
NUM_SEEDS = 100


@pytest.mark.parametrize("max_imbalance", [1.01, 1.05, 1.3])
@pytest.mark.parametrize("num_chunks, cp_size", SIZES)
def test_no_assignment_under_the_cap_moves_fewer_rows(
    num_chunks: int, cp_size: int, max_imbalance: float
) -> None:
    """Nearly always, and little is lost otherwise. An unreachable cap is LPT's highest load.

    Where one assignment in twenty keeps the cap, it is kept. One that few keep may be missed:
    trades are no exhaustive search.
    """
    found, fewest = [], []
    for seed in range(NUM_SEEDS):
        problem = SmallProblem(seed, num_chunks, cp_size, max_imbalance)
        ranks = problem.owners()
        reached = problem.highest_load(ranks) <= problem.cap
        assert reached or problem.share_under_cap < 0.05, problem
        cap = problem.cap if reached else problem.highest_load(problem.owners(trials=0))
        found.append(int(problem.rows(ranks)))
        fewest.append(problem.fewest_rows(cap))
    best = sum(a == b for a, b in zip(found, fewest, strict=True))
    assert min(a - b for a, b in zip(found, fewest, strict=True)) >= 0
    assert best >= 0.97 * NUM_SEEDS
    assert sum(found) <= 1.01 * sum(fewest)


@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from(SIZES),
    max_imbalance=st.sampled_from([1.0, 1.01, 1.05, 1.3]),
    trials=st.sampled_from([1, 2, 5, 20, 100, 1000]),
)
@settings(max_examples=300, deadline=None)
def test_any_budget_keeps_the_limits(
    seed: int, size: tuple[int, int], max_imbalance: float, trials: int
) -> None:
    """However few trials: no rank above the cap or LPT's fullest one, no more rows than LPT's."""
    problem = SmallProblem(seed, *size, max_imbalance)
    lpt, swap = problem.owners(trials=0), problem.owners(trials=trials)
    lpt_load = problem.highest_load(lpt)
    assert problem.highest_load(swap) <= max(problem.cap, lpt_load)
    if lpt_load <= problem.cap:
        assert problem.rows(swap) <= problem.rows(lpt)
