"""Which backward schedules let parts of a key tile take turns at one sum."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from megatron_magi import masks
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.native import solver


class Chosen(NamedTuple):
    splits: int
    lanes: int
    in_turns: bool
    whole: int
    bands: int
    """Of a tile."""


def chosen(mask: AttnMask, heads: tuple[int, int] = (64, 8), **options: object) -> Chosen:
    tokens = mask.total_seqlen_q, mask.total_seqlen_k
    work = solver.choose_bwd(mask.slices, *tokens, *heads, **options)  # type: ignore[arg-type]
    bands = int(work.items[:, 7].max())
    assert len(work.items) <= bands * work.num_tiles
    return Chosen(work.num_splits, work.lanes_per_section, work.in_turns, work.whole_heads, bands)


@pytest.mark.parametrize(("tokens", "bands"), [(26624, 1), (32768, 1), (65536, 2), (131072, 4)])
def test_long_even_rows_run_one_head_after_another_in_bands(tokens: int, bands: int) -> None:
    """Of 34 MB of Q, dO and dQ, which stay in the cache wherever blocks are in them."""
    assert chosen(masks.full(tokens)) == (8, 1, True, 0, bands)


def test_rows_of_half_the_width_need_half_the_bands() -> None:
    assert chosen(masks.full(65536), head_dim=64).bands == 1
    assert chosen(masks.full(131072), head_dim=64).bands == 2


@pytest.mark.parametrize("heads", [(16, 16), (8, 8)])
def test_a_head_of_its_own_is_cut_into_bands_alone(heads: tuple[int, int]) -> None:
    assert chosen(masks.full(65536), heads) == (1, 1, True, 0, 2)


@pytest.mark.parametrize(("tokens", "splits"), [(65536, 4), (131072, 8)])
def test_splits_of_a_long_uneven_document_run_one_after_another(tokens: int, splits: int) -> None:
    """Its items would drift apart over all heads of a kv head; bands did not help it."""
    assert chosen(masks.causal(tokens)) == (splits, 1, True, 0, 1)


def test_the_last_kv_head_alone_is_split_where_processors_end_apart() -> None:
    """16k: 1,024 equal blocks are 7.8 rounds of 132."""
    assert chosen(masks.full(16384)) == (8, 1, True, 7, 1)


def test_whole_rounds_leave_no_kv_head_to_be_split() -> None:
    rounds = masks.full(16384, 132 * 128)
    assert chosen(rounds) == (1, 1, False, 0, 1)


def test_splits_at_once_take_turns_if_blocks_are_long() -> None:
    """Blocks of a tile that end together wait for one another."""
    assert chosen(masks.causal(16384)) == (2, 2, True, 0, 1)
    short = chosen(masks.causal(1024))
    assert short.splits > 1 and not short.in_turns


@pytest.mark.parametrize("keys", [208, 1280])
def test_few_tiles_leave_no_time_for_turns(keys: int) -> None:
    """Their lanes run together, not one after another: parts would wait for one another."""
    assert not chosen(masks.full(1024, keys)).in_turns


@pytest.mark.parametrize("mask", [masks.causal(65536), masks.full(65536)], ids=["causal", "full"])
def test_turns_are_for_fast_mode(mask: AttnMask) -> None:
    """In deterministic mode blocks of one lane would wait for one another."""
    exact = chosen(mask, deterministic=True)
    assert exact[2:] == (False, 0, 1) and exact.lanes > 1
    assert chosen(mask).in_turns
    assert not chosen(mask, may_take_turns=False).in_turns


def test_documents_in_groups_keep_their_heads_together() -> None:
    lengths = np.cumsum([0, 4096, 1024, 6000, 700, 3000, 1564]).tolist()
    made = chosen(masks.from_cu_seqlens(lengths))
    assert made.lanes % made.splits == 0 and made.whole == 0 and made.bands == 1


@pytest.mark.parametrize("make", [masks.full, masks.causal])
@pytest.mark.parametrize("tokens", [16384, 65536, 131072])
def test_sums_of_long_rows_are_small(tokens: int, make: object) -> None:
    """One sum for each key of a kv head, whatever the number of parts: 3 % of dq in fp32."""
    mask = make(tokens)  # type: ignore[operator]
    work = solver.choose_bwd(mask.slices, tokens, tokens, 64, 8)
    heads = max(1, work.lanes_per_section // work.num_splits)
    assert work.in_turns
    assert work.num_tiles * heads * 128 * (128 + 128) <= tokens * 64 * 128 // 32
