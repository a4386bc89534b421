"""Prepared casts of three ranks, and what a prepared cast must hold."""

from __future__ import annotations

import numpy as np
import torch

from megatron_magi import HeadShape
from megatron_magi.core.comm.prepared_cast import PreparedCast, prepare_casts
from megatron_magi.core.plan import GroupCastPlan, make_attn_plan
from tests.dense import random_mask
from tests.knobs import magi_config


def casts(mode: str, num_rows: int = 60) -> list[PreparedCast]:
    """Of three ranks; forward and backward."""
    config = magi_config(overlap_degree=2, forward_mode=mode)
    plan = make_attn_plan(random_mask(3, 180, 180), 3, HeadShape(2, 2, 64), config)
    assert plan.layout.num_local_tokens == num_rows
    views = [plan.rank_plan(rank) for rank in range(3)]
    stages = [s for view in views for s in (*view.forward_stages, *view.stages)]
    wanted = [s.cast for s in stages if s.cast is not None]
    return prepare_casts(wanted, torch.device("cpu"))


def index_of(cast: PreparedCast, name: str) -> list[int]:
    table = getattr(cast, name)
    return list(range(cast.num_own)) if table is None else table.here().tolist()


def rows(ranges: np.ndarray) -> list[int]:
    return [row for start, end in ranges.tolist() for row in range(start, end)]


def check_cast(made: PreparedCast, cast: GroupCastPlan, num_rows: int, is_reduced: bool) -> None:
    sent, own = rows(cast.send_ranges), rows(cast.own_ranges)
    counts = list(cast.send_counts), list(cast.recv_counts)
    assert (made.sent.send, made.sent.recv) == (made.returned.recv, made.returned.send) == counts
    assert (made.num_sent, made.num_recv, made.num_own) == (len(sent), cast.num_recv, len(own))
    assert made.send.here().tolist() == sent and made.send.data.dtype == torch.int32
    if made.own is not None:
        assert made.own.here().tolist() == own
    else:
        assert own in ([], list(range(num_rows)))
    assert [list(range(len(sent)))[part] for part in made.peers] == parts(cast.send_counts)
    assert (made.sources is not None) >= is_reduced
    if made.sources is not None:
        begin, sources = made.sources.begin.here().tolist(), made.sources.sources.here().tolist()
        assert made.sources.owners is made.send and len(begin) == num_rows + 1
        for row in range(num_rows):
            assert sources[begin[row] : begin[row + 1]] == [
                i for i, r in enumerate(sent) if r == row
            ]


def parts(counts: tuple[int, ...]) -> list[list[int]]:
    ends = np.cumsum(counts).tolist()
    return [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
