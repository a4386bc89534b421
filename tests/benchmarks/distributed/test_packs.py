"""Packs of the distributed benchmark: lengths and names."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.distributed import packs as bench
from megatron_magi.cli.parser import UsageError


def test_short_documents_are_bounded_and_fill_the_pack() -> None:
    lengths = bench.short_documents(1 << 20, np.random.default_rng(0))
    assert sum(lengths) == 1 << 20
    body = np.array(lengths[:-1])
    assert (body % 8 == 0).all() and body.min() >= 32 and body.max() <= 16384
    assert 1000 < np.median(body) < 1400, "the median of the lognormal is 1200"


def test_long_documents_fit_what_is_left_and_are_never_alone() -> None:
    for seed in range(20):
        lengths = bench.long_documents(32768, np.random.default_rng(seed))
        assert sum(lengths) == 32768 and len(lengths) >= 2 and min(lengths) > 0
    many = bench.long_documents(1 << 24, np.random.default_rng(0))
    share = np.mean([64_000 <= n < 128_000 for n in many])
    assert 0.25 < share < 0.4, "0.40 of 1.25 while everything fits"


@pytest.mark.parametrize("total", [0, 1])
def test_a_pack_of_two_documents_needs_two_tokens(total: int) -> None:
    """They would be drawn again for ever."""
    with pytest.raises(UsageError, match=f"at least 2 tokens, got {total}; use more"):
        bench.pack("d2:0", total)
    assert bench.pack("d2:0", 2).total_seqlen_q == 2


def test_names() -> None:
    assert bench.packs("d1:0-2") == ["d1:0", "d1:1", "d1:2"]
    assert bench.packs("prolong:7") == ["prolong:7"]
    assert bench.packs("causal") == [] and bench.packs("d3:0") == []
    one, same, other = (bench.pack(name, 4096) for name in ("wlb:1", "wlb:1", "wlb:2"))
    assert one == same and one != other and one.total_seqlen_q == 4096
