"""Plans executed rank by rank in one process: any mask, any cp_size up to 64, exact in fp64.

The interpreter does what ranks do, with plain indexing in place of messages, so that sizes and
numbers of cases that processes could not afford are covered.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_magi import AttnMask, AttnPlan, HeadShape, MagiConfig, masks, plan
from megatron_magi.core.kernel.backend import AttnCall, GradCall, row_delta
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.plan import StagePlan
from tests.dense import NAMES, assert_as_good_as_dense, random_mask, random_qkv
from tests.knobs import magi_config

BACKEND = ReferenceBackend()
SCALE = 4**-0.5


def padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x.detach(), x.new_zeros(rows - len(x), *x.shape[1:])])


def key_rows(stage: StagePlan, own: Tensor) -> Tensor:
    """Global rows of the stage's key buffer."""
    if stage.cast is None:
        return own[: stage.num_keys]
    kept = [own[a:b] for a, b in stage.cast.own_ranges.tolist()]
    received = [torch.arange(a, b) for a, b in stage.cast.recv_ranges.tolist()]
    rows = torch.cat([own[:0], *kept, *received])
    assert len(rows) == stage.num_keys
    return rows


def interpret(plan: AttnPlan, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv of the whole sequence."""
    total, everything = len(q), plan.layout.padded_seqlen
    q, k, v, dout = (padded(x, everything) for x in (q, k, v, dout))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=q.dtype)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rank in range(plan.cp_size):
        own = torch.from_numpy(plan.layout.position_ids(rank))
        so_far = None
        view = plan.rank_plan(rank)
        for stage in view.forward_stages:
            keys, table = key_rows(stage, own), SliceTable(stage.slices, len(own), stage.num_keys)
            given = {"prev" if view.forward_merges else "into": so_far}
            so_far = BACKEND.forward(AttnCall(q[own], k[keys], v[keys], table, SCALE), **given)
        assert so_far is not None
        out[own], lse[own] = so_far
        delta = row_delta(so_far[0], dout[own], torch.float64)
        for stage in view.stages:
            keys, table = key_rows(stage, own), SliceTable(stage.slices, len(own), stage.num_keys)
            parts = BACKEND.backward(
                AttnCall(q[own], k[keys], v[keys], table, SCALE),
                GradCall(dout[own], so_far[1], delta),
            )
            for grad, index, part in zip((dq, dk, dv), (own, keys, keys), parts, strict=True):
                grad.index_add_(0, index, part)
    assert (lse[total:] == -torch.inf).all() and (out[total:] == 0).all(), "pad rows see nothing"
    return dict(zip(NAMES, (x[:total] for x in (out, lse, dq, dk, dv)), strict=True))


def check(mask: AttnMask, cp_size: int, config: MagiConfig, multiple: int = 1) -> None:
    q, k, v, dout = random_qkv(mask, 2, 1, 4, torch.float64, cp_size)
    made = plan(mask, cp_size, HeadShape(2, 1, 4), config, token_multiple=multiple)
    assert made.layout.num_local_tokens % multiple == 0
    ours = interpret(made, q, k, v, dout)
    assert_as_good_as_dense(ours, (q, k, v, dout), mask, torch.float64)


configs = st.builds(
    magi_config,
    overlap_degree=st.sampled_from([None, 0, 1, 2, 5]),
    forward_mode=st.sampled_from([None, "at_once", "local_first", "local_first", "staged"]),
    swap_trials=st.sampled_from([0, None]),
    tile_q=st.sampled_from([4, 128]),
    tile_k=st.sampled_from([4, 128]),
)


@given(
    seed=st.integers(0, 2**31),
    length=st.integers(1, 48),
    cp_size=st.integers(1, 9),
    config=configs,
    multiple=st.sampled_from([1, 1, 2, 4]),
)
@settings(max_examples=120, deadline=None)
def test_any_legal_mask(
    seed: int, length: int, cp_size: int, config: MagiConfig, multiple: int
) -> None:
    check(random_mask(seed, length, length, max_slices=8), cp_size, config, multiple)


@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=8).filter(sum),
    cp_size=st.sampled_from([2, 3, 7, 16, 33, 64]),
    config=configs,
)
@settings(max_examples=12, deadline=None)
def test_packed_documents_on_many_ranks(
    lengths: list[int], cp_size: int, config: MagiConfig
) -> None:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    check(masks.from_cu_seqlens(bounds), cp_size, config)
