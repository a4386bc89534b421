"""Where a rank's rows lie at its peers agrees with what the peers send."""

from __future__ import annotations

import pytest

from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.core.plan import make_attn_plan
from megatron_magi.core.plan.peer_rows import MAX_PEERS, reads_peers

DOCUMENTS = masks.from_cu_seqlens([0, 5, 700, 701, 1000, 1280, 2101])


@pytest.mark.parametrize("mode", ["at_once", "local_first", "staged"])
@pytest.mark.parametrize("degree", [0, 1, 3])
@pytest.mark.parametrize("cp_size", [2, 5])
def test_rows_begin_where_the_peer_has_put_them(cp_size: int, degree: int, mode: str) -> None:
    config = MagiConfig(overlap_degree=degree, forward_mode=mode)  # type: ignore[arg-type]
    plan = make_attn_plan(DOCUMENTS, cp_size, HeadShape(8, 2, 64), config)
    views = [plan.rank_plan(rank) for rank in range(cp_size)]
    seen = 0
    for name in ("stages", "forward_stages"):
        for stages in zip(*(getattr(view, name) for view in views), strict=True):
            casts = [stage.cast for stage in stages]
            if casts[0] is None:
                continue
            seen += 1
            for me, (stage, cast) in enumerate(zip(stages, casts, strict=True)):
                sent = [sum(peer.send_counts[:me]) for peer in casts]
                returned = [sum(peer.recv_counts[:me]) for peer in casts]
                assert cast.starts == (tuple(sent), tuple(returned))
                assert cast.num_sent <= plan.slot_rows.sent
                if name == "stages":
                    assert stage.num_own + cast.num_recv <= plan.slot_rows.returned
                    # Own rows lie before returned ones, as many on every rank.
                    assert stage.num_own == stages[0].num_own
    assert seen >= 2


def test_only_plans_for_such_a_transport_say_where() -> None:
    assert reads_peers(MagiConfig(), 8, 0) and reads_peers(MagiConfig(transport="symm_mem"), 8, 0)
    assert not reads_peers(MagiConfig(transport="all_to_all"), 8, 0)
    assert not reads_peers(MagiConfig(), 8, 4), "ranks of several nodes"
    assert not reads_peers(MagiConfig(), 1, 0) and not reads_peers(MagiConfig(), MAX_PEERS + 1, 0)
    plan = make_attn_plan(DOCUMENTS, 4, HeadShape(8, 2, 64), MagiConfig(transport="all_to_all"))
    assert all(s.cast is None or s.cast.starts is None for s in plan.rank_plan(0).stages)
