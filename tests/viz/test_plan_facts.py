"""The numbers behind tables and pictures, against the plan's own tables."""

from itertools import pairwise

import numpy as np
import pytest

from megatron_magi import AttnMask, HeadShape, MagiConfig, masks
from megatron_magi.config import ForwardMode
from megatron_magi.core.plan import AttnPlan, make_attn_plan
from megatron_magi.core.plan.peer_rows import rows_between
from megatron_magi.viz.plan_facts import (
    OURS,
    PER_DOCUMENT,
    PER_SEQUENCE,
    compare_layouts,
    exchange_bytes,
    forward_stage_rows,
    receive_bytes,
    ring_rows,
    stage_rows,
    zigzag_layout,
)
from tests.knobs import magi_config

MASK = masks.from_cu_seqlens([0, 3000, 3100, 8192])
HEADS = HeadShape(8, 2, 64)


def plan(cp_size: int, degree: int | None) -> AttnPlan:
    mode = None if degree is None else "staged"
    return make_attn_plan(
        MASK, cp_size, HEADS, MagiConfig(overlap_degree=degree, forward_mode=mode)
    )


@pytest.mark.parametrize("cp_size, degree", [(1, 0), (2, 0), (3, 1), (4, 3), (8, None)])
def test_traffic_is_what_the_ranks_exchange(cp_size: int, degree: int | None) -> None:
    p = plan(cp_size, degree)
    rows = rows_between(p.transfers, p.cp_size)
    assert (rows.diagonal() == 0).all()
    for rank in range(cp_size):
        casts = [s.cast for s in p.rank_plan(rank).stages if s.cast]
        received = np.sum([c.recv_counts for c in casts], axis=0) if casts else [0] * cp_size
        sent = np.sum([c.send_counts for c in casts], axis=0) if casts else [0] * cp_size
        assert (rows[:, rank] == received).all() and (rows[rank] == sent).all()
        by_stage = [s.cast.num_recv if s.cast else 0 for s in p.rank_plan(rank).stages]
        assert stage_rows(p)[rank].tolist() == by_stage
    assert (p.rows_received <= ring_rows(p)).all()


def test_two_stages_of_receive_buffers_are_alive() -> None:
    p = plan(4, 3)
    rows = stage_rows(p)
    want = [max(a + b for a, b in zip(r, [*r[1:], 0], strict=True)) for r in rows.tolist()]
    assert receive_bytes(p).tolist() == [w * 2 * 2 * 64 * 2 for w in want]


def test_one_stage_on_all_keys_has_them_all_in_its_buffer() -> None:
    p = plan(4, 0)
    rows = p.layout.num_local_tokens + stage_rows(p)[:, 0]
    assert receive_bytes(p).tolist() == (rows * 2 * 2 * 64 * 2).tolist()


def test_zigzag_is_the_usual_layout() -> None:
    layout = zigzag_layout(64, 4)
    assert layout.chunk_ranks.tolist() == [0, 1, 2, 3, 3, 2, 1, 0] and layout.chunk_size == 8
    odd = zigzag_layout(61, 4)
    assert odd.padded_seqlen == 64 and odd.total_seqlen == 61
    causal = make_attn_plan(
        masks.causal(8192), 4, HEADS, magi_config(), layout=zigzag_layout(8192, 4)
    )
    assert causal.imbalance < 1.01
    usual = make_attn_plan(MASK, 4, HEADS, magi_config(), layout=zigzag_layout(8192, 4))
    assert usual.imbalance > 1.1


@pytest.mark.parametrize("cp_size", [1, 3, 4])
def test_layouts_are_told_apart(cp_size: int) -> None:
    ours = plan(cp_size, None)
    usual = make_attn_plan(MASK, cp_size, HEADS, MagiConfig(), layout=zigzag_layout(8192, cp_size))
    layouts = compare_layouts(ours, usual)
    assert list(layouts) == [PER_SEQUENCE, PER_DOCUMENT, OURS]
    per_document = layouts[PER_DOCUMENT]
    assert per_document is not None and layouts[PER_SEQUENCE] is not None
    multiple = 2 * cp_size
    padded = sum(-(-n // multiple) * multiple for n in (3000, 100, 5092))
    assert per_document.padding_tokens == padded - 8192
    assert per_document.rows_received.tolist() == [padded // cp_size * (cp_size - 1)] * cp_size
    assert layouts[PER_SEQUENCE].rows_received.tolist() == [ring_rows(usual)] * cp_size
    for name, p in ((PER_SEQUENCE, usual), (OURS, ours)):
        assert layouts[name].rows_needed.tolist() == p.rows_received.tolist()
        assert layouts[name].imbalance == p.imbalance
    for layout in layouts.values():
        ranges = sorted(map(tuple, np.concatenate(layout.row_ranges).tolist()))
        assert ranges[0][0] == 0 and ranges[-1][1] == 8192
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
    without = make_attn_plan(masks.prefix_lm([0, 64], [8]), 1, HEADS, MagiConfig())
    assert compare_layouts(without, without)[PER_DOCUMENT] is None


@pytest.mark.parametrize("mode", ["at_once", "local_first", "staged"])
@pytest.mark.parametrize("degree", [0, 1, 3])
def test_rows_of_the_forwards_stages_are_the_plans(degree: int, mode: ForwardMode) -> None:
    p = make_attn_plan(MASK, 4, HEADS, MagiConfig(overlap_degree=degree, forward_mode=mode))
    for rank, rows in enumerate(forward_stage_rows(p).tolist()):
        stages = p.rank_plan(rank).forward_stages
        assert rows == [s.cast.num_recv if s.cast else 0 for s in stages]


def test_sent_queries_have_buffers_too() -> None:
    """Two ranks, one head of 8 in bf16: 16 queries go each way, and no key does."""
    mask = AttnMask([[0, 32, 0, 4096, -9999, 9999]], 32, 4096)
    p = make_attn_plan(mask, 2, HeadShape(1, 1, 8), MagiConfig())
    assert len(p.transfers) == 0 and len(p.query_transfers) == 2
    arriving = 16 * (2 * 8 * 2 + (2 + 8) * 4)  # q and dout; lse, delta and dq
    own_gradients = 2048 * 2 * 8 * 4
    returning = 16 * 8 * 4
    assert exchange_bytes(p).tolist() == [arriving + own_gradients + returning] * 2
