"""Whole plans against dense masks: who needs what, what arrives, what every stage computes."""

from __future__ import annotations

import itertools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_magi import masks
from megatron_magi.config import MagiConfig
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.native import solver
from megatron_magi.core.plan import (
    HeadShape,
    contiguous_layout,
    make_attn_plan,
    num_local_tokens,
)
from tests.core.plan.plan_checks import check
from tests.core.plan.test_plan_on import FEW_KEY_HEADS
from tests.knobs import magi_config, with_trials

HEADS = HeadShape(8, 2, 64)
SMALL_TILES = magi_config(tile_q=8, tile_k=8)
OPEN = (-(2**31), 2**31 - 1)


def packed_causal(*lengths: int, tail: int = 0) -> AttnMask:
    """Causal documents one after another, then `tail` rows that see nothing."""
    ends = np.cumsum(lengths)
    rows = [(e - n, e, e - n, e, OPEN[0], 0) for n, e in zip(lengths, ends, strict=True)]
    total = int(ends[-1]) + tail
    return AttnMask(np.array(rows, np.int32), total, total)


def window(total: int, left: int, right: int = 0) -> AttnMask:
    return AttnMask(np.array([(0, total, 0, total, -left, right)], np.int32), total, total)


def random_mask(rng: np.random.Generator, total: int) -> AttnMask:
    """A random subset of a random tiling of the square by banded rectangles."""
    cuts = [0, *sorted(rng.integers(0, total + 1, int(rng.integers(0, 4))).tolist()), total]
    rows = []
    for q0, q1 in itertools.pairwise(cuts):
        for k0, k1 in itertools.pairwise(cuts):
            d = int(rng.integers(-total, total + 1))
            kept = rng.random(2) < 0.6
            rows += [(q0, q1, k0, k1, OPEN[0], d)] * int(kept[0])
            rows += [(q0, q1, k0, k1, d + 1, OPEN[1])] * int(kept[1])
    slices = np.array(rows, np.int32).reshape(-1, 6)
    return AttnMask(slices[rng.permutation(len(slices))], total, total)


@given(
    seed=st.integers(0, 2**32 - 1),
    total=st.integers(0, 120),
    cp_size=st.integers(1, 8),
    degree=st.sampled_from([None, 0, 1, 2, 3, 4]),
    swap_trials=st.sampled_from([0, None]),
    multiple=st.integers(1, 4),
    chunk=st.sampled_from([None, None, 1, 2, 3, 5]),
    mode=st.sampled_from([None, "at_once", "local_first", "local_first", "staged"]),
)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_mask_on_any_group(seed, total, cp_size, degree, swap_trials, multiple, chunk, mode):
    if chunk is not None and -(-total // chunk) < cp_size:
        chunk = None
    mask = random_mask(np.random.default_rng(seed), total)
    config = magi_config(
        chunk_size=chunk, swap_trials=swap_trials, overlap_degree=degree, forward_mode=mode,
        tile_q=4, tile_k=8,
    )  # fmt: skip
    plan = make_attn_plan(mask, cp_size, HEADS, config, token_multiple=multiple)
    assert plan.layout.num_local_tokens % multiple == 0
    check(plan)


@dataclass(frozen=True)
class Case:
    name: str
    mask: AttnMask
    cp_size: int
    config: MagiConfig = SMALL_TILES

    def __str__(self) -> str:
        return self.name


BLOCKS = magi_config(chunk_size=8, tile_q=8, tile_k=8)  # 32 chunks a rank: blocks of 8, 4, 2, 1
EMPTY = AttnMask(np.zeros((0, 6), np.int32), 37, 37)
FULL = AttnMask(np.array([(0, 64, 0, 64, *OPEN)], np.int32), 64, 64)
CASES = [
    Case("one token, four ranks", packed_causal(1), 4),
    Case("fewer tokens than ranks", packed_causal(2, 3), 7),
    Case("nothing visible", EMPTY, 3),
    Case("a rank without work", packed_causal(8, tail=120), 4, magi_config(chunk_size=32)),
    Case("full, 3 ranks", FULL, 3),
    Case("prime length", packed_causal(127), 5),
    Case("one document, 6 ranks", packed_causal(192), 6),
    Case("documents of one token", packed_causal(*[1] * 40), 4),
    Case("window across all borders", window(160, 30, 12), 5),
    Case("64 ranks", packed_causal(40, 150, 3, 63), 64),
    Case("64 ranks, one row each", packed_causal(64), 64),
    Case("no remote key", packed_causal(16, 16, 16, 16), 4, magi_config(chunk_size=16)),
    Case("deep stages", packed_causal(96), 4, magi_config(chunk_size=8, overlap_degree=4)),
    Case("no token", AttnMask(np.zeros((0, 6), np.int32), 0, 0), 4),
    Case("search over blocks", packed_causal(300, 37, 190, 13, 228), 3, BLOCKS),
    Case("more stages than rows", packed_causal(6), 3, magi_config(overlap_degree=9)),
    Case("degree 0", packed_causal(70, 30), 4, magi_config(chunk_size=5, overlap_degree=0)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_named_cases(case):
    check(make_attn_plan(case.mask, case.cp_size, HEADS, case.config))
    config = replace(case.config, forward_mode="local_first")
    check(make_attn_plan(case.mask, case.cp_size, HEADS, config))


def test_one_rank_exchanges_nothing():
    plan = make_attn_plan(packed_causal(30, 20), 1, HEADS, magi_config())
    assert plan.overlap_degree == 0 and len(plan.transfers) == 0
    (stage,) = plan.rank_plan(0).stages
    assert stage.cast is None and stage.num_keys == 50
    assert np.array_equal(stage.slices, plan.mask.slices)


def test_stages_with_nothing_to_receive_have_no_cast():
    config = magi_config(chunk_size=16, overlap_degree=2)
    plan = make_attn_plan(packed_causal(16, 16), 2, HEADS, config)
    for rank in range(2):
        assert [s.cast for s in plan.rank_plan(rank).stages] == [None] * 3


def test_fragments_are_joined():
    """A causal mask that one rank owns whole stays one slice whatever the chunk size."""
    config = magi_config(chunk_size=4)
    plan = make_attn_plan(packed_causal(64), 1, HEADS, config)
    assert len(plan.rank_plan(0).stages[0].slices) == 1
    # Late rows read all early ones: owners alternate, the rectangle is one slice in the buffer.
    mask = AttnMask(np.array([(48, 64, 0, 48, *OPEN)], np.int32), 64, 64)
    plan = make_attn_plan(mask, 4, HEADS, with_trials(replace(config, overlap_degree=1), 0))
    assert [len(s.slices) for r in range(4) for s in plan.rank_plan(r).stages] == [1] * 8


def test_stages_are_nearly_equal():
    config = magi_config(chunk_size=128, overlap_degree=4)
    plan = make_attn_plan(packed_causal(16384), 4, HEADS, config)
    for rank in range(4):
        rows = [s.cast.num_recv for s in plan.rank_plan(rank).stages[1:]]
        assert max(rows) <= 1.3 * sum(rows) / 4


def test_stages_cut_ranges_at_whole_tiles():
    """Rank 0 reads 5000 rows of rank 1 in one range; three stages share them."""
    mask = AttnMask(np.array([(0, 5000, 5000, 10_000, *OPEN)], np.int32), 10_000, 10_000)
    config = magi_config(chunk_size=5000, overlap_degree=3, swap_trials=0)
    transfers = make_attn_plan(mask, 2, HEADS, config).transfers
    assert transfers[:, 0].tolist() == [1, 2, 3]
    assert (transfers[:, 4] - transfers[:, 3]).tolist() == [1664, 1664, 1672]


def test_the_only_balanced_assignment_is_kept():
    """Tiles 1, 2, 3, 4 on two ranks: 1 + 4 and 2 + 3, though 1 + 2 and 3 + 4 moves fewer rows."""
    plan = make_attn_plan(packed_causal(512), 2, HEADS, magi_config(chunk_size=128))
    assert plan.imbalance == 1.0
    assert plan.layout.chunk_ranks.tolist() in ([0, 1, 1, 0], [1, 0, 0, 1])


def test_peers_come_in_turn():
    config = magi_config(chunk_size=128, overlap_degree=3)
    full = AttnMask(np.array([(0, 4096, 0, 4096, *OPEN)], np.int32), 4096, 4096)
    plan = make_attn_plan(full, 4, HEADS, config)
    for rank in range(4):
        for turn, stage in enumerate(plan.rank_plan(rank).stages[1:], start=1):
            sources = [s for s, count in enumerate(stage.cast.recv_counts) if count]
            assert sources == [(rank + turn) % 4]


def long_tailed(seed: int, total: int) -> AttnMask:
    """Documents of 100 to total / 4 tokens, short ones more often."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        length = int(100 * (total / 400) ** rng.random())
        lengths.append(min(length, total - sum(lengths)))
    return packed_causal(*lengths)


@pytest.mark.parametrize("cp_size", [2, 3, 4, 7, 8, 64])
def test_search_keeps_the_load_cap_and_moves_fewer_rows(cp_size):
    mask = long_tailed(cp_size, 4096 * cp_size)
    lpt = make_attn_plan(mask, cp_size, HEADS, magi_config(chunk_size=256, swap_trials=0))
    swap = make_attn_plan(mask, cp_size, HEADS, magi_config(chunk_size=256))
    assert lpt.imbalance < 1.02
    assert swap.imbalance <= 1.01
    assert swap.rows_received.sum() <= 0.45 * lpt.rows_received.sum()
    assert swap.loads.sum() == lpt.loads.sum()


def test_trades_balance_what_lpt_cannot():
    """LPT ends above the cap, trades bring it below; without trades the plan says so."""
    mask, config = long_tailed(3, 3 * 4096), magi_config(chunk_size=512)
    assert make_attn_plan(mask, 3, HEADS, with_trials(config, 0)).imbalance > 1.02
    assert make_attn_plan(mask, 3, HEADS, config).imbalance <= 1.01


def test_unreachable_cap_is_no_error():
    plan = make_attn_plan(packed_causal(4096, 64), 4, HEADS, magi_config(chunk_size=1040))
    assert plan.imbalance > 1.5  # one chunk per rank: nothing to trade


def describe(seed: int) -> tuple[int, bytes, bytes]:
    rng = np.random.default_rng(seed)
    mask = packed_causal(*rng.integers(1, 900, 50).tolist())
    plan = make_attn_plan(mask, 5, HEADS, magi_config())
    return plan.digest, plan.layout.chunk_ranks.tobytes(), plan.transfers.tobytes()


def test_every_process_makes_the_same_plan():
    with ProcessPoolExecutor(2) as pool:
        for seed in range(3):
            assert pool.submit(describe, seed).result() == describe(seed)


GOLDEN = [
    (4, magi_config(), 8644491546516251796),
    (7, magi_config(chunk_size=128, link_gib_s=10.0, stage_latency_us=2.0), 12169151466160069101),
    (8, magi_config(swap_trials=0, link_gib_s=10.0, stage_latency_us=2.0), 14167422035681196704),
    (64, magi_config(chunk_size=256, stage_latency_us=1.0), 17415255782032089141),
]


@pytest.mark.parametrize("cp_size, config, want", GOLDEN)
def test_every_machine_makes_the_same_plan(cp_size, config, want):
    """Fails after a change of the planner: raise PLANNER_VERSION, then write the new hash here."""
    lengths = [1 + 41 * (i * i * i % 127) for i in range(1, 2 * cp_size)]
    plan = make_attn_plan(packed_causal(*lengths), cp_size, HEADS, config)
    made = plan.layout.chunk_ranks.tobytes() + plan.transfers.tobytes()
    assert solver.hash64(made + plan.forward_mode.encode()) == want


LPT = magi_config(swap_trials=0)


@pytest.mark.parametrize("config", [LPT, replace(LPT, chunk_size=96)])
@pytest.mark.parametrize("total", [1, 5, 768, 769, 8192, 8209, 100_003])
def test_local_length_never_depends_on_the_mask(total, config):
    for cp_size in (1, 2, 3, 7, 8):
        for multiple in (1, 2, 6):
            if config.chunk_size and -(-total // config.chunk_size) < cp_size:
                continue
            want = num_local_tokens(total, cp_size, config, multiple)
            for mask in (window(total, 5), packed_causal(total)):
                plan = make_attn_plan(mask, cp_size, HEADS, config, token_multiple=multiple)
                assert plan.layout.num_local_tokens == want
            assert want % multiple == 0 and want * cp_size >= total
            if config.chunk_size is None:
                if total % (cp_size * multiple) == 0:
                    assert want * cp_size == total
                per_rank = -(-total // cp_size)
                assert want - per_rank <= multiple * max(1, per_rank // 32)


@pytest.mark.parametrize("total", [4097, 8201, 100_003])
@pytest.mark.parametrize("multiple", [3, 5, 6, 7, 12])
def test_padding_keeps_the_token_multiple(total, multiple):
    """Ranks long enough to be padded to a power of two are padded to a common multiple."""
    alone, config = num_local_tokens(total, 2, magi_config()), magi_config()
    assert alone * 2 - total > 1, "this length is padded for its chunks, too"
    want = num_local_tokens(total, 2, config, multiple)
    plan = make_attn_plan(packed_causal(total), 2, HEADS, config, token_multiple=multiple)
    assert plan.layout.num_local_tokens == want
    assert want % multiple == 0 and plan.layout.padded_seqlen >= total
    assert plan.layout.num_local_tokens % plan.layout.chunk_size == 0


BAD = [
    (dict(config=magi_config(chunk_size=64)), "leave every one of 4 ranks a chunk .* got 64"),
    (
        dict(layout=make_attn_plan(packed_causal(96), 4, HEADS, magi_config()).layout),
        "total_seqlen = 128, got 96",
    ),
    (
        dict(layout=make_attn_plan(packed_causal(128), 2, HEADS, magi_config()).layout),
        "cp_size = 4, got 2",
    ),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_input_is_refused(change, message):
    given = dict(mask=packed_causal(128), cp_size=4, head_shape=HEADS, config=magi_config())
    with pytest.raises(ValueError, match=message):
        make_attn_plan(**{**given, **change})


def test_a_given_key_layout_means_cross_attention() -> None:
    """Also if it equals that of the queries, and whether it is the same object or a copy."""
    layout = contiguous_layout(64, 2, MagiConfig())
    plans = [
        make_attn_plan(
            masks.full(64), 2, FEW_KEY_HEADS, MagiConfig(), layout=layout, key_layout=keys
        )
        for keys in (layout, contiguous_layout(64, 2, MagiConfig()))
    ]
    assert plans[0] == plans[1]
    assert plans[0].cross_layout == layout


def test_a_key_layout_of_another_length_is_refused() -> None:
    mask = AttnMask([[0, 8, 0, 24, -99, 99]], 8, 24)
    with pytest.raises(ValueError, match=r"key_layout must be .* total_seqlen = 24, got 8"):
        make_attn_plan(
            mask, 2, FEW_KEY_HEADS, MagiConfig(), key_layout=contiguous_layout(8, 2, MagiConfig())
        )
