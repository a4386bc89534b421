"""Plans that are made before their microbatch comes."""

from __future__ import annotations

from megatron_magi.launcher.plan_prefetch import NUM_WAITING, PlansAhead


def test_plans_that_nobody_takes_are_dropped() -> None:
    plans: PlansAhead[int, int] = PlansAhead(lambda key: 10 * key)
    for key in range(NUM_WAITING + 1):
        plans.begin(key)
    assert plans.take(0) is None and plans.take(1) == 10 and plans.take(NUM_WAITING) is not None
    assert plans.take(1) is None
