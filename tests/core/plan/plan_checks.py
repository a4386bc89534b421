"""A whole plan against the dense mask: who needs what, what arrives, what every stage computes."""

from __future__ import annotations

import numpy as np

from megatron_magi.core.native import solver
from megatron_magi.core.plan import AttnPlan, GroupCastPlan, NodeCastPlan, StagePlan


def check(plan: AttnPlan) -> None:
    """Everything below."""
    dense = plan.mask.to_dense()
    check_dispatch(plan)
    check_transfers(plan, dense)
    check_ranks(plan, dense)
    check_loads(plan, dense)


def check_dispatch(plan: AttnPlan) -> None:
    d = plan.layout
    assert d.num_local_tokens * d.cp_size == d.padded_seqlen >= d.total_seqlen
    assert d.num_local_tokens % d.chunk_size == 0
    assert np.array_equal(np.sort(d.permutation()), np.arange(d.padded_seqlen))
    for rank in range(d.cp_size):
        runs = [np.arange(a, b) for a, b in d.local_ranges(rank).tolist()]
        assert np.array_equal(np.concatenate(runs), d.position_ids(rank))
        assert (np.diff(d.position_ids(rank)) > 0).all()


def check_transfers(plan: AttnPlan, dense: np.ndarray) -> None:
    """Every (row, rank) needed is received exactly once, from its owner; nothing else is."""
    d = plan.layout
    owner = np.repeat(d.chunk_ranks, d.chunk_size)[: d.total_seqlen]
    received = np.zeros((d.cp_size, d.total_seqlen), int)
    for stage, dst, src, start, end in plan.transfers.tolist():
        assert min(plan.overlap_degree, 1) <= stage <= plan.overlap_degree
        assert (owner[start:end] == src).all() and dst != src and start < end
        received[dst, start:end] += 1
    for rank in range(d.cp_size):
        needed = dense[owner == rank].any(axis=0) & (owner != rank)
        assert np.array_equal(received[rank], needed.astype(int))
    rows = d.native.rows_to_travel(plan.mask.slices)  # what the search minimises
    assert rows == received.sum() == plan.rows_received.sum()
    order = plan.transfers[:, :4].tolist()
    assert order == sorted(order)


def check_ranks(plan: AttnPlan, dense: np.ndarray) -> None:
    """Stages' slices, mapped back, are the mask, no cell twice; casts of all ranks pair up."""
    views = [plan.rank_plan(r) for r in range(plan.cp_size)]
    assert plan.num_stages == plan.overlap_degree + 1
    check_stages(plan, dense, [view.stages for view in views], plan.num_stages)
    mode = plan.forward_mode
    if mode == "local_first" and not len(plan.transfers):
        mode = "staged"
    count = {"at_once": 1, "local_first": 2, "staged": plan.num_stages}[mode]
    check_stages(plan, dense, [view.forward_stages for view in views], count)
    for view in views:
        several = plan.overlap_degree > 0 and len(plan.transfers) > 0
        assert view.forward_merges == (mode == "staged" and several)
        if mode == "local_first":
            check_local_first(*view.forward_stages)


def check_local_first(local: StagePlan, waiting: StagePlan) -> None:
    """No row twice; every row that waits has something to wait for; no own key for nothing."""
    rows = [
        {r for q0, q1 in s.slices[:, :2].tolist() for r in range(q0, q1)} for s in (local, waiting)
    ]
    assert not rows[0] & rows[1]
    assert {r for a, b in local.left_rows.tolist() for r in range(a, b)} == rows[1]
    assert len(waiting.left_rows) == 0
    assert local.cast is None and waiting.cast is not None
    received = {
        r for q0, q1, _, k1, lo, hi in waiting.slices.tolist()
        for r in range(q0, q1) if min(k1, r + hi + 1) > waiting.num_own
    }  # fmt: skip
    assert received == rows[1]
    own = {k for _, _, k0, k1, _, _ in waiting.slices.tolist() for k in range(k0, k1)}
    assert own >= set(range(waiting.num_own))


def check_stages(plan: AttnPlan, dense: np.ndarray, views: list, count: int) -> None:
    """``views``: every rank's stages."""
    d = plan.layout
    seen = np.zeros((d.padded_seqlen, d.padded_seqlen), int)
    for rank, stages in enumerate(views):
        assert len(stages) == count
        rows = d.position_ids(rank)
        for number, stage in enumerate(stages):
            keys = list(rows) if number == 0 and stage.cast is None else []
            if stage.cast is not None:
                for a, b in stage.cast.own_ranges.tolist():
                    keys += list(rows[a:b])
                assert stage.num_own == len(keys)
                for a, b in stage.cast.recv_ranges.tolist():
                    keys += range(a, b)
            assert stage.num_keys == len(keys)
            assert np.array_equal(solver.canonical_slices(stage.slices), stage.slices)
            for q0, q1, k0, k1, lo, hi in stage.slices.tolist():
                d_kq = np.arange(k0, k1) - np.arange(q0, q1)[:, None]
                seen[np.ix_(rows[q0:q1], keys[k0:k1])] += (lo <= d_kq) & (d_kq <= hi)
    n = d.total_seqlen
    assert np.array_equal(seen[:n, :n], dense.astype(int))
    assert seen[n:].sum() == seen[:, n:].sum() == 0
    for number in range(count):
        casts = [stages[number].cast for stages in views]
        assert all(c is None for c in casts) or all(c is not None for c in casts)
        if casts[0] is not None:
            check_casts(plan, casts)


def check_casts(plan: AttnPlan, casts: list) -> None:
    """What rank s sends to rank d, row by row, is what d's buffer expects from s."""
    own = [plan.layout.position_ids(rank).tolist() for rank in range(plan.cp_size)]
    if isinstance(casts[0], NodeCastPlan):
        check_steps(plan, casts, own)
    else:
        check_exchange(casts, own, list(range(plan.cp_size)))


def check_steps(plan: AttnPlan, casts: list[NodeCastPlan], own: list[list[int]]) -> None:
    """The same for both steps of an exchange among nodes; what arrives first is sent on."""
    ranks, per_node = list(range(plan.cp_size)), plan.ranks_per_node
    check_exchange([c.first for c in casts], own, ranks)
    arrived = [rows_of(cast.first.recv_ranges) for cast in casts]
    check_exchange([c.spreading for c in casts], arrived, ranks)
    for rank, cast in enumerate(casts):
        node, number = rank // per_node, rank % per_node
        peers = [dst for dst, count in enumerate(cast.first.send_counts) if count]
        assert all(dst // per_node == node or dst % per_node == number for dst in peers)
        spread = [dst for dst, count in enumerate(cast.spreading.send_counts) if count]
        assert all(dst // per_node == node and dst != rank for dst in spread)
        both = arrived[rank] + rows_of(cast.spreading.recv_ranges)
        assert rows_of(cast.recv_ranges) == both and cast.num_recv == len(both) == len(set(both))
        assert cast.spreading.num_rows == cast.first.num_recv


def check_exchange(casts: list[GroupCastPlan], sources: list[list[int]], group: list[int]) -> None:
    """``sources``: the global rows that each rank sends from; ``group``: who exchanges rows."""
    sent: dict[tuple[int, int], list[int]] = {}
    for src in group:
        rows = rows_of(casts[src].send_ranges)
        assert len(rows) == casts[src].num_sent and len(casts[src].send_counts) == len(group)
        at = 0
        for dst, count in zip(group, casts[src].send_counts, strict=True):
            sent[src, dst] = [sources[src][row] for row in rows[at : at + count]]
            at += count
    for dst in group:
        assert rows_of(casts[dst].recv_ranges) == [r for src in group for r in sent[src, dst]]
        assert [len(sent[src, dst]) for src in group] == list(casts[dst].recv_counts)


def rows_of(ranges: np.ndarray) -> list[int]:
    return [row for a, b in ranges.tolist() for row in range(a, b)]


def check_loads(plan: AttnPlan, dense: np.ndarray) -> None:
    """Tiles, counted cell by cell."""
    d, c = plan.layout, plan.config
    loads = np.zeros(d.cp_size, int)
    for chunk, rank in enumerate(d.chunk_ranks):
        rows = dense[chunk * d.chunk_size : (chunk + 1) * d.chunk_size]
        for tile in range(0, len(rows), c.costs.tile_q):
            keys = rows[tile : tile + c.costs.tile_q].any(axis=0)
            loads[rank] += sum(
                keys[k : k + c.costs.tile_k].any() for k in range(0, d.total_seqlen, c.costs.tile_k)
            )
    assert plan.loads.tolist() == loads.tolist()
