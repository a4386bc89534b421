"""Who owns which chunk, as a value."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_magi import masks
from megatron_magi.config import MagiConfig
from megatron_magi.core.plan.token_layout import TokenLayout, choose_token_layout, num_local_tokens


def owners(*ranks: int) -> np.ndarray:
    return np.array(ranks, dtype=np.int32)


def test_one_chunk_of_one_rank_is_a_layout() -> None:
    plan = TokenLayout(5, 8, 1, owners(0))
    assert plan.chunk_ranks.tolist() == [0]


@pytest.mark.parametrize("ranks", [(), (0,), (0, 1, 1)])
def test_ranks_own_equally_many_chunks(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"multiple of cp_size = 2 chunks, got {len(ranks)}"):
        TokenLayout(24, 8, 2, owners(*ranks))


def test_a_token_multiple_that_fits_pads_nothing() -> None:
    """4,296 tokens a rank are 537 units of 8, and divide into 8 chunks."""
    assert num_local_tokens(4 * 4296, 4, MagiConfig(), 8) == 4296


def test_a_prime_number_of_tokens_is_padded() -> None:
    """10,007 has no divisor; a 40th of 10,240 is a chunk."""
    assert num_local_tokens(4 * 10007, 4, MagiConfig()) == 10240


def test_a_layout_cannot_be_changed() -> None:
    plan = TokenLayout(5, 8, 1, owners(0))
    with pytest.raises(ValueError, match="read-only"):
        plan.chunk_ranks[0] = 1


@pytest.mark.parametrize(
    ("tokens", "chunk_size", "remedy"),
    [(10, 4, "use at most 3, or None"), (3, 1, "with fewer tokens than ranks use None")],
)
def test_the_remedy_for_too_large_chunks_helps(tokens: int, chunk_size: int, remedy: str) -> None:
    mask, cp_size = masks.causal(tokens), 4
    with pytest.raises(ValueError, match=f"got {chunk_size}; {remedy}"):
        choose_token_layout(mask, cp_size, MagiConfig(chunk_size=chunk_size))
    for taken in (2, None) if tokens == 10 else (None,):
        layout = choose_token_layout(mask, cp_size, MagiConfig(chunk_size=taken))
        assert layout.cp_size == cp_size and layout.total_seqlen == tokens
