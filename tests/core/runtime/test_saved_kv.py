"""Keys that a forward keeps: the same answer without sending them again, over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.runtime import kept_jobs as jobs
from tests.process_pool import pool

WORLD = 5


@pytest.mark.slow
@pytest.mark.parametrize("degree", [0, 1, 3, None, "local_first", "at_once"])
@pytest.mark.parametrize("cp_size", [1, 2, 5])
def test_any_legal_mask(cp_size: int, degree: int | str | None) -> None:
    first = 1000 * cp_size + 100 * (degree if isinstance(degree, int) else 7)
    pool(WORLD).run(jobs.random_masks, cp_size, list(range(first, first + 12)), degree, {})


@pytest.mark.parametrize("degree", [0, 2, "local_first", "at_once"])
def test_among_nodes(degree: int | str) -> None:
    how: dict[str, Any] = {"ranks_per_node": 2, "dkv_reduce_in_fp32": False}
    pool(WORLD).run(jobs.random_masks, 4, list(range(40, 50)), degree, how)


@pytest.mark.parametrize("name", ["packed", "window", "sees nothing", "fewer tokens than ranks"])
@pytest.mark.parametrize("degree, mode", [(0, "local_first"), (2, "local_first"), (4, "at_once")])
def test_stages_cut_otherwise_in_the_backward(degree: int, mode: str, name: str) -> None:
    pool(WORLD).run(jobs.mixed_stages, 3, degree, mode, name)


def test_what_is_saved_for_the_backward() -> None:
    pool(WORLD).run(jobs.what_is_saved, 2)


def test_recomputed_activations() -> None:
    pool(WORLD).run(jobs.recomputed, 3)
