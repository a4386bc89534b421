"""The benchmark of torchtitan runs, and its ways to attend compute the same.

`PYTHONPATH=CHECKOUT:FOLDER pytest tests/benchmarks/train/test_titan.py`; see
tests/frameworks/test_torchtitan.py.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from benchmarks.train import titan
from tests.frameworks import titan_jobs as jobs
from tests.process_pool import pool

LENGTH = 2048


def rows(_: int, ways: list[str]) -> list[dict[str, Any]]:
    """What the program would record; FlexAttention has no gradients on the CPU."""
    titan.allow_releases_of_torch()
    jobs.attend_on_the_cpu()
    saved: list[list[dict[str, Any]]] = []
    options = Namespace(ways=ways, length=LENGTH, rounds=2, limit_s=1e-3, autotune=True)
    found = titan.measure(options, saved.append)
    assert saved == [found]  # the time was up after the first round
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_ways_have_the_losses_of_ours() -> None:
    pytest.importorskip("torchtitan")
    ways = ["ours", "headtail", "ptrr"]
    found, others = pool(2).run(rows, ways, timeout_s=400)
    assert [row["way"] for row in found] == ways
    for row, other in zip(found, others, strict=True):
        assert row["losses"] == other["losses"] and len(row["losses"]) == titan.WARM_ROUNDS + 1
        assert row["largest_difference"] < 1e-5
        assert row["n"] == 1 and row["padding"] == 0
        if row["way"] != "ours":
            assert row["rows_received"] == [LENGTH / 2] * 2
    assert 0 < max(found[0]["rows_received"]) < LENGTH / 2


def test_a_sample_is_the_same_every_time_and_its_documents_restart() -> None:
    sample, again = (titan.drawn_sample(5, LENGTH, 100) for _ in range(2))
    assert sample.tokens.tolist() == again.tokens.tolist()
    assert int(sample.tokens.max()) < 100 and sample.bounds[-1] == LENGTH
    starts = (sample.positions == 0).nonzero().flatten().tolist()
    assert starts == sample.bounds[:-1]
    last = [end - 1 for end in sample.bounds[1:]]
    assert (sample.labels == -100).nonzero().flatten().tolist() == last
    assert sample.labels[0] == sample.tokens[1]


def test_losses_that_differ_do_not_agree() -> None:
    assert titan.compared([2.0, 1.0], [2.0, 1.004])["agrees"]
    assert not titan.compared([2.0, 1.0], [2.0, 1.006])["agrees"]
