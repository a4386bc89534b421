"""When links between nodes are told apart, what is refused, and what it is worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_magi import AttnMask, HeadShape, MagiConfig, masks
from megatron_magi.core.native import solver
from megatron_magi.core.plan import AttnPlan, make_attn_plan, predict_times
from megatron_magi.core.plan.token_layout import LOAD_CAPS, ranks_per_node
from tests.knobs import magi_config

HEADS = HeadShape(32, 8, 128)


def among(per_node: int | None, **rates: float) -> MagiConfig:
    return magi_config(ranks_per_node=per_node, **rates)


@pytest.mark.parametrize(
    "given, cp_size, wanted",
    [(None, 16, 0), (8, 8, 0), (8, 4, 0), (1, 16, 0), (8, 16, 8), (2, 4, 2), (4, 16, 4)],
)
def test_one_node_or_nodes_of_one_rank_are_one_network(
    given: int | None, cp_size: int, wanted: int
) -> None:
    assert ranks_per_node(among(given), cp_size) == wanted
    plan = make_attn_plan(masks.causal(256), cp_size, HEADS, among(given))
    assert plan.ranks_per_node == wanted


def test_uneven_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks_per_node must divide the 12 ranks .* got 8"):
        make_attn_plan(masks.causal(256), 12, HEADS, among(8))


def test_nodes_are_part_of_what_ranks_agree_on() -> None:
    flat, nodes = (make_attn_plan(masks.causal(256), 8, HEADS, among(n)) for n in (None, 4))
    assert flat.digest != nodes.digest
    assert flat.field_digests["config"] != nodes.field_digests["config"]


def packed(seed: int, total: int) -> AttnMask:
    """Documents of mixed lengths, as a training pack has them."""
    rng = np.random.default_rng(seed)
    ends = [0]
    while ends[-1] < total:
        ends.append(min(total, ends[-1] + int(rng.lognormal(7.5, 1.3)) + 1))
    return masks.from_cu_seqlens(ends)


def rows_crossing(plan: AttnPlan, per_node: int, *, once: bool) -> int:
    """Rows on the links between nodes, each once for a node, or once for each of its readers."""
    transfers = plan.transfers
    if once:
        transfers = solver.crossing_leg(transfers, per_node)
    crosses = transfers[:, 1] // per_node != transfers[:, 2] // per_node
    return int((transfers[crosses, 4] - transfers[crosses, 3]).sum())


def test_fewer_rows_cross_and_balance_holds() -> None:
    """Never more than the plan without nodes would need, and half on most packs: a document that is
    longer than a node's share has to cross."""
    shares = []
    for seed in range(6):
        mask = packed(seed, 32 * 8192)
        flat, nodes = (make_attn_plan(mask, 32, HEADS, among(n)) for n in (None, 8))
        assert nodes.imbalance <= LOAD_CAPS[-1]
        found = rows_crossing(nodes, 8, once=True)
        shares.append(found / rows_crossing(flat, 8, once=True))
        assert shares[-1] <= 1 and found < 0.8 * rows_crossing(flat, 8, once=False)
        assert nodes.rows_received.sum() < 1.3 * flat.rows_received.sum()
    assert np.median(shares) < 0.5


def test_a_row_that_every_rank_reads_crosses_once() -> None:
    flat, nodes = (make_attn_plan(masks.full(8192), 16, HEADS, among(n)) for n in (None, 4))
    assert rows_crossing(flat, 4, once=False) == 8192 * 12
    assert rows_crossing(nodes, 4, once=True) == 8192 * 3


def test_the_slower_link_decides_the_modelled_times() -> None:
    mask = masks.full(16384)
    fast = make_attn_plan(mask, 16, HEADS, among(4, node_link_gib_s=250.0))
    slow = make_attn_plan(mask, 16, HEADS, among(4, node_link_gib_s=25.0))
    costs = {"tile_ps": 1, "exchange_ps": 0, "call_ps": 0, "pass_ps": 0, "grad_row_ps": 2}
    for plan, crossing_ps in ((fast, 10), (slow, 100)):
        table = solver.StageCosts(row_ps=10, crossing_row_ps=crossing_ps, **costs)
        rows = plan.layout.native.rows_on_link(plan.transfers, table, 4)
        # 1024 rows each: 3 ranks of the node take them, and 3 relays on each of 3 nodes; a rank
        # sends its own to 3 neighbours, and spreads those of 3 others to the same 3.
        assert rows.tolist() == [max(3 + 9, 3 * crossing_ps // 10) * 1024] * 16
    assert predict_times(slow).forward_us > predict_times(fast).forward_us


def test_between_nodes_the_cap_with_the_shortest_prediction_is_taken() -> None:
    """At least one pack pays for fewer rows with load, and none takes longer than with 1.01."""
    chosen = set()
    for seed in range(4):
        mask = packed(seed, 32 * 8192)
        plan, *fixed = (
            make_attn_plan(mask, 32, HEADS, replace(among(8), max_imbalance=cap))
            for cap in (None, *LOAD_CAPS)
        )
        times = [us(each) for each in fixed]
        assert us(plan) == min(times)
        chosen.add(times.index(min(times)))
        in_node = make_attn_plan(mask, 8, HEADS, among(8))
        first = make_attn_plan(mask, 8, HEADS, replace(among(8), max_imbalance=LOAD_CAPS[0]))
        assert in_node.layout == first.layout
    assert chosen - {0}


def us(plan: AttnPlan) -> float:
    times = predict_times(plan)
    return times.forward_us + times.backward_us
