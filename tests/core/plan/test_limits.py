"""What the planner takes: everything else is an error at once, with what would be taken."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi import AttnMask, AttnSlice, masks
from megatron_magi.core.plan import HeadShape, PlanSizeError, TokenLayout, make_attn_plan
from megatron_magi.core.plan import make_plan as planning
from megatron_magi.core.plan.limits import check_size, max_chunks_per_rank
from tests.knobs import magi_config

HEADS = HeadShape(8, 2, 64)


@pytest.fixture
def no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem that reaches the planner's work fails: refused means refused before it."""

    def reached(*_: Any, **__: Any) -> None:
        raise AssertionError("the planner began")

    monkeypatch.setattr(planning, "choose_token_layout", reached)
    monkeypatch.setattr(planning, "plan_on", reached)


@pytest.mark.usefixtures("no_solver")
@pytest.mark.parametrize("tokens, cp_size, knobs, text", [
    (2**16, 4, dict(chunk_size=1), "4 ranks may have at most 8,192 chunks each"),
    (2**20, 64, dict(chunk_size=8), "use a chunk_size of at least 16 for these 1,048,576 tokens"),
    (2**24, 4096, dict(), "use a chunk_size of at least 1,024 for these 16,777,216 tokens"),
    (2**24, 4096, dict(chunk_size=512), "4,096 ranks may have at most 4 chunks each"),
    (2**25, 8, dict(tile_q=1), "slices may touch at most 16,777,216 tiles of 1 query rows"),
    (2**12, 8, dict(swap_trials=10**9), "swap_trials must be at most 100,000,000"),
])  # fmt: skip
def test_refused_before_any_work(
    tokens: int, cp_size: int, knobs: dict[str, Any], text: str
) -> None:
    with pytest.raises(PlanSizeError, match=re.escape(text)):
        make_attn_plan(masks.causal(tokens), cp_size, HEADS, magi_config(**knobs))


@pytest.mark.usefixtures("no_solver")
def test_padding_and_given_layouts_count() -> None:
    with pytest.raises(PlanSizeError, match="at most 1,073,741,824 tokens, padding included"):
        make_attn_plan(masks.causal(100), 2, HEADS, magi_config(), token_multiple=10**12)
    with pytest.raises(
        PlanSizeError,
        match=r"got 4,294,967,294 for a sequence of 100 with MagiConfig\.chunk_size 2147483647 and "
        "token_multiple 1; use a smaller chunk_size or token_multiple",
    ):
        make_attn_plan(masks.causal(100), 2, HEADS, magi_config(chunk_size=2**31 - 1))
    layout = TokenLayout(2**17, 1, 8, np.repeat(np.arange(8), 2**14).astype(np.int32))
    with pytest.raises(PlanSizeError, match="8 ranks may have at most 8,192 chunks each"):
        make_attn_plan(masks.causal(2**17), 8, HEADS, magi_config(), layout=layout)


@pytest.mark.usefixtures("no_solver")
def test_keys_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "query_layouts", lambda *_: pytest.fail("the planner began"))
    mask = AttnMask([AttnSlice(0, 64, 0, 2**20)], 64, 2**20)
    text = "use a chunk_size of at least 16 for these 1,048,576 tokens"
    with pytest.raises(PlanSizeError, match=text):
        make_attn_plan(mask, 64, HEADS, magi_config(chunk_size=1))
    layout = TokenLayout(2**20, 8, 64, np.repeat(np.arange(64), 2**11).astype(np.int32))
    with pytest.raises(PlanSizeError, match=text):
        make_attn_plan(mask, 64, HEADS, magi_config(), key_layout=layout)


@given(cp_size=st.integers(1, 8192), tokens=st.integers(2**13, 2**29))
def test_the_chunk_size_in_the_message_is_the_least(cp_size: int, tokens: int) -> None:
    mask = masks.causal(tokens)
    most = max_chunks_per_rank(cp_size)
    least = -(-tokens // (cp_size * most))
    check_size(mask, cp_size, magi_config(chunk_size=least), None, 1)
    if least > 1:
        with pytest.raises(PlanSizeError, match=f"at least {least:,} for"):
            check_size(mask, cp_size, magi_config(chunk_size=least - 1), None, 1)


@given(cp_size=st.integers(1, 1024), tokens=st.integers(0, 2**27))
def test_up_to_1024_ranks_the_planners_own_chunks_are_taken(cp_size: int, tokens: int) -> None:
    check_size(masks.causal(tokens), cp_size, magi_config(), None, 1)


def test_as_many_tokens_as_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_magi.core.plan.limits.MAX_TOKENS", 4096)
    check_size(masks.causal(4096), 4, magi_config(), None, 1)
    with pytest.raises(PlanSizeError, match="at most 4,096 tokens, padding included, got 4,"):
        check_size(masks.causal(4097), 1, magi_config(), None, 1)


def test_a_free_chunk_size_counts_as_64_chunks_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_magi.core.plan.limits.MAX_CHUNKS_PER_RANK", 64)
    check_size(masks.causal(4096), 1, magi_config(), None, 1)
    monkeypatch.setattr("megatron_magi.core.plan.limits.MAX_CHUNKS_PER_RANK", 63)
    with pytest.raises(PlanSizeError, match="chunk_size of at least"):
        check_size(masks.causal(4096), 1, magi_config(), None, 1)


def test_slices_times_ranks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks.from_cu_seqlens([0, 100, 200, 300])
    monkeypatch.setattr("megatron_magi.core.plan.limits.MAX_SLICES_TIMES_RANKS", 12)
    check_size(mask, 4, magi_config(), None, 1)
    with pytest.raises(PlanSizeError, match="times ranks must be at most 12, got 3 x 5"):
        check_size(mask, 5, magi_config(), None, 1)
