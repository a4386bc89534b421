"""Dispatched tokens by key: there, back, shifted, and where they are."""

from __future__ import annotations

from torch import Tensor

from megatron_magi.checks import integer
from megatron_magi.core.kernel.autograd import one_graph_break
from megatron_magi.core.runtime import token_dispatch as _tokens
from megatron_magi.core.runtime.shift import shift_tokens
from megatron_magi.core.runtime.token_dispatch import Side
from megatron_magi.magi_attention.runtime_key import DistAttnRuntimeKey, check_key, remember


@one_graph_break
def dispatch(
    x: Tensor, key: DistAttnRuntimeKey, pad_value: float = 0.0, *, side: Side = "queries"
) -> Tensor:
    """This rank's tokens of a full sequence that every rank holds; differentiable.

    Args:
        x: [total_seqlen, ...], the same on every rank.
        pad_value: fills rows behind the end of the sequence.
        side: "queries", or "keys" of a key that was made with ``is_same_source=False``.

    Returns:
        [num_tokens_local, ...].

    Cost: nothing travels; the backward gathers the gradient on every rank.
    """
    remember(key)
    return _tokens.dispatch(x, key.plan, key.cp_group, pad_value=pad_value, side=side)


@one_graph_break
def undispatch(
    x: Tensor,
    key: DistAttnRuntimeKey,
    is_partial_grad: bool = False,
    *,
    side: Side = "queries",
) -> Tensor:
    """The full sequence on every rank; differentiable.

    Args:
        x: [num_tokens_local, ...].
        is_partial_grad: the gradient of the result differs from rank to rank and is summed.
        side: as in ``dispatch``.

    Returns:
        [total_seqlen, ...], without padding.

    Cost: one all-gather; with is_partial_grad the backward adds an all-reduce.
    """
    remember(key)
    return _tokens.undispatch(x, key.plan, key.cp_group, is_partial_grad=is_partial_grad, side=side)


def roll(x: Tensor, shift: int, dim: int, key: DistAttnRuntimeKey) -> Tensor:
    """``torch.roll`` of the full sequence, on dispatched tokens; differentiable.

    As there: a positive shift moves tokens toward the end, so the labels of the next token are
    ``roll(tokens, -1, 0, key)``.

    Args:
        x: num_tokens_local tokens in ``dim``; padding rows stay.

    Cost: only rows that lie on another rank travel, each once.
    """
    remember(key)
    return shift_tokens(x, -integer(shift, "shift"), key.plan, key.cp_group, dim)


def roll_simple(x: Tensor, shift: int, dim: int, key: DistAttnRuntimeKey) -> Tensor:
    """``roll``; MagiAttention's second implementation of it has no counterpart here."""
    return roll(x, shift, dim, key)


def get_position_ids(key: DistAttnRuntimeKey, *, side: Side = "queries") -> Tensor:
    """int64 [num_tokens_local] on the CPU: each local token's place in the packed sequence.

    Padding rows get the last place, so tables of total_seqlen entries may be indexed with it.
    """
    check_key(key)
    return _tokens.position_ids(key.plan, key.cp_group, side=side)
