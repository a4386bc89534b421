"""Tokens by key on one rank: there and back, rolled, and where they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_magi import magi_attention as api
from tests.magi_attention.one_rank import varlen_key

CHUNKED = api.DistAttnConfig(dispatch_config=api.DispatchConfig(chunk_size=3))
"""16 tokens in chunks of 3: 18 rows, of which 2 are padding."""


@pytest.fixture
def key() -> api.DistAttnRuntimeKey:
    return varlen_key(dist_attn_config=CHUNKED)


def tokens(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def test_tokens_come_back_without_their_padding(key: api.DistAttnRuntimeKey) -> None:
    x = tokens(16, 2).requires_grad_()
    local = api.dispatch(x, key, pad_value=-7.0)
    assert local.shape == (18, 2) and (local == -7).sum() == 2 * 2
    back = api.undispatch(local, key)
    assert torch.equal(back, x)
    (back * tokens(16, 2)).sum().backward()
    assert torch.equal(x.grad, tokens(16, 2))


def test_positions_are_those_of_the_local_tokens(key: api.DistAttnRuntimeKey) -> None:
    """Padding has the last place, so that tables of the sequence's length take every position."""
    places = api.get_position_ids(key)
    assert places.dtype == torch.int64 and places.device.type == "cpu"
    x = tokens(16)
    local = api.dispatch(x, key)
    is_padding = local == 0
    assert is_padding.sum() == 2 and (places[is_padding] == 15).all()
    assert torch.equal(x[places][~is_padding], local[~is_padding])


@pytest.mark.parametrize("roll", [api.roll, api.roll_simple])
@pytest.mark.parametrize("shift", [-1, 1, 5, -16])
def test_a_roll_is_torchs(roll: object, shift: int, key: api.DistAttnRuntimeKey) -> None:
    """Also along another dimension; padding stays where it is."""
    x = tokens(16, 2)
    local = api.dispatch(x, key, pad_value=-7.0)
    rolled = roll(local, shift, 0, key)  # type: ignore[operator]
    assert torch.equal(api.undispatch(rolled, key), torch.roll(x, shift, 0))
    assert torch.equal(rolled == -7, local == -7)
    across = roll(local.T.contiguous(), shift, 1, key)  # type: ignore[operator]
    assert torch.equal(across.T, rolled)


def test_a_call_makes_its_key_the_most_recent_one(key: api.DistAttnRuntimeKey) -> None:
    x = tokens(18)
    calls = [
        lambda: api.dispatch(x[:16], key),
        lambda: api.undispatch(x, key),
        lambda: api.roll(x, 1, 0, key),
    ]
    for call in calls:
        other = varlen_key(causal=True)
        assert api.get_most_recent_key(None) is other
        call()
        assert api.get_most_recent_key(None) is key
