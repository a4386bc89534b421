"""One rank's tables of one exchange."""

from __future__ import annotations

import numpy as np

from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.core.plan import make_attn_plan
from megatron_magi.core.plan.group_cast_plan import NO_RANGES, cast_of


def test_tables_of_an_exchange_cannot_be_changed(stages: list) -> None:
    for cast in (stage.cast for stage in stages if stage.cast is not None):
        for table in (cast.send_ranges, cast.recv_ranges, cast.own_ranges):
            assert not table.flags.writeable
        assert cast.num_recv == sum(e - s for s, e in cast.recv_ranges.tolist())
        assert cast.num_sent == sum(e - s for s, e in cast.send_ranges.tolist())


def test_own_rows_in_front_are_counted(stages: list) -> None:
    cast = next(stage.cast for stage in stages if stage.cast is not None)
    assert cast.num_own == 0
    assert cast.with_own(np.array([[3, 5], [7, 8]], np.int32)).num_own == 3


def test_the_same_exchange_behind_other_own_rows_shares_its_tables(stages: list) -> None:
    """Devices upload a table once for all casts that have it."""
    cast = next(stage.cast for stage in stages if stage.cast is not None)
    own = np.array([[0, 4]], np.int32)
    other = cast.with_own(own)
    assert other.own_ranges is own and cast.own_ranges is NO_RANGES
    assert other.send_ranges is cast.send_ranges and other.recv_ranges is cast.recv_ranges
    assert (other.send_counts, other.recv_counts) == (cast.send_counts, cast.recv_counts)
    assert other.num_rows == cast.num_rows


def test_a_rank_without_transfers_has_empty_tables() -> None:
    layout = make_attn_plan(masks.causal(64), 4, HeadShape(4, 2, 8), MagiConfig()).layout
    cast = cast_of(layout, np.zeros((0, 5), np.int32), 2)
    assert cast.send_counts == cast.recv_counts == (0, 0, 0, 0)
    assert cast.num_sent == cast.num_recv == cast.num_own == 0
    assert cast.send_ranges.shape == cast.recv_ranges.shape == (0, 2)
    assert cast.num_rows == layout.num_local_tokens


def test_tables_are_those_of_the_transfers() -> None:
    """Rows by destination and then in order, and once to every rank that reads them."""
    config = MagiConfig(chunk_size=16)
    layout = make_attn_plan(masks.causal(64), 2, HeadShape(4, 2, 8), config).layout
    first, second = (int(np.flatnonzero(layout.chunk_ranks == rank)[0]) * 16 for rank in (0, 1))
    moved = [(0, 1, 0, first + 2, first + 5), (0, 0, 1, second, second + 1)]
    transfers = np.array(sorted(moved), np.int32)
    casts = [cast_of(layout, transfers, rank) for rank in range(2)]
    assert [c.send_counts for c in casts] == [(0, 3), (1, 0)]
    assert [c.recv_counts for c in casts] == [(0, 1), (3, 0)]
    assert [c.send_ranges.tolist() for c in casts] == [[[2, 5]], [[0, 1]]]
    assert casts[1].recv_ranges.tolist() == [[first + 2, first + 5]]
    assert casts[0].recv_ranges.tolist() == [[second, second + 1]]
