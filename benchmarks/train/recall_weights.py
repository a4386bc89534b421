"""Weights of a model that copies: where a token was seen before, it foretells the one behind it.

Nothing is learned. The first layer's heads see the token before, the second layer's heads see the
token whose predecessor is the query's token (an induction head of Elhage et al., "A mathematical
framework for transformer circuits", 2021). So a token is foretold if one key, however far, is seen,
and is not if a mask hides it. `install` puts the weights into the model that Megatron has built.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.train.pretrain_cases import Flags

CODE, ONE = 256, 4.0
"""Channels of a token's code, which are 1 or -1, and the value of a channel that is constant."""
GROUPS, QUERIES, HEAD_DIM = 4, 2, 64
"""Groups of heads, query heads of each, and channels of a head. A group moves its part of a code;
its query heads do the same, and the second one's output is dropped."""
HIDDEN = 4 * CODE
CURRENT, CONSTANT, BEFORE, FORETOLD = 0, CODE, 2 * CODE, 3 * CODE
"""First channels of what a layer reads and writes: codes of the token, of the one before it, of the
one that is foretold, and between them the constant."""
ROTATED, BASE = 16, 10_000
"""Channels of a head that the rotary embedding turns, and its base."""
BEFORE_LOGIT, SAME_LOGIT, TOKEN_LOGIT = 32.0, 0.75, 0.1
"""Of a rotated pair of channels that agree, an equal channel of two codes, and an equal channel of
a code and the vocabulary's: 16 nats part the key before a query from its neighbours, 1.5 nats every
channel in which two codes differ, and a token has a logit of 25.6 where that of others is 0 with a
standard deviation of 1.6."""

MODEL: Flags = {
    "num-layers": 2,
    "hidden-size": HIDDEN,
    "num-attention-heads": GROUPS * QUERIES,
    "num-query-groups": GROUPS,
    "kv-channels": HEAD_DIM,
    "ffn-hidden-size": HEAD_DIM,
    "rotary-percent": ROTATED / HEAD_DIM,
    "rotary-base": BASE,
}
"""What the weights fit; with it RMSNorm, no bias, and a vocabulary's own weights at the output."""


def install() -> None:
    """Give these weights to every model when it is made, before an optimizer copies them."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    original = GPTModel.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        fill(self.named_parameters())

    GPTModel.__init__ = init


def fill(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Write the weights: of norms 1, of what copying does not need 0."""
    for name, parameter in parameters:
        if name in WEIGHTS:
            value = WEIGHTS[name](parameter.shape[0])
        else:
            value = torch.full(parameter.shape, float("norm" in name))
        with torch.no_grad():
            parameter.copy_(value)


def codes(vocab: int) -> Tensor:
    """Of every token, 1 and -1, (vocab, CODE)."""
    generator = torch.Generator().manual_seed(2026)
    return 2.0 * torch.randint(2, (vocab, CODE), generator=generator) - 1


def rms(parts: int) -> float:
    """Of the channels that a layer reads when this many parts of them hold a code: its norm divides
    by it, and a weight that multiplies by it reads the codes as they are."""
    return math.sqrt((parts * CODE + ONE**2) / HIDDEN)


def embedding(vocab: int) -> Tensor:
    """A token's code, and the constant, (vocab, HIDDEN)."""
    weight = torch.zeros(vocab, HIDDEN)
    weight[:, CURRENT : CURRENT + CODE] = codes(vocab)
    weight[:, CONSTANT] = ONE
    return weight


def output(vocab: int) -> Tensor:
    """A logit for every token whose code is the foretold one, (vocab, HIDDEN)."""
    weight = torch.zeros(vocab, HIDDEN)
    weight[:, FORETOLD : FORETOLD + CODE] = TOKEN_LOGIT * rms(3) * codes(vocab)
    return weight


def previous_qkv(rows: int) -> Tensor:
    """Every query looks for the key one token before it, and takes its code: rows of `qkv`."""
    pairs = ROTATED // 2
    amplitude = math.sqrt(BEFORE_LOGIT * math.sqrt(HEAD_DIM)) * rms(1) / ONE
    angles = BASE ** (-torch.arange(pairs) / pairs)
    query, key = torch.zeros(2, HEAD_DIM, HIDDEN)
    query[:pairs, CONSTANT] = amplitude
    # A key turned on by one position meets the query that is one position behind it.
    key[:pairs, CONSTANT] = amplitude * angles.cos()
    key[pairs:ROTATED, CONSTANT] = amplitude * angles.sin()
    return qkv(rows, lambda group: (query, key, _reading(CURRENT, group, HEAD_DIM, rms(1))))


def matching_qkv(rows: int) -> Tensor:
    """A query looks for keys that have its token before them, and takes their own code."""
    same = HEAD_DIM - ROTATED
    amplitude = math.sqrt(SAME_LOGIT * math.sqrt(HEAD_DIM)) * rms(2)

    def parts(group: int) -> tuple[Tensor, Tensor, Tensor]:
        query = _reading(CURRENT, group, same, amplitude)
        key = _reading(BEFORE, group, same, amplitude)
        return query, key, _reading(CURRENT, group, HEAD_DIM, rms(2))

    return qkv(rows, parts)


def qkv(rows: int, parts: Callable[[int], tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Megatron's order of a group's queries, keys and values, (rows, HIDDEN)."""
    groups = [parts(group) for group in range(GROUPS)]
    weight = torch.cat([part for q, k, v in groups for part in (*[q] * QUERIES, k, v)])
    assert len(weight) == rows, "the model has the flags of MODEL, on one rank"
    return weight


def _reading(first: int, group: int, channels: int, amplitude: float) -> Tensor:
    """The last channels of a head read the group's part of the code there, (HEAD_DIM, HIDDEN)."""
    weight = torch.zeros(HEAD_DIM, HIDDEN)
    head = torch.arange(HEAD_DIM - channels, HEAD_DIM)
    weight[head, first + group * HEAD_DIM + torch.arange(channels)] = amplitude
    return weight


def projection(first: int) -> Callable[[int], Tensor]:
    """Of the heads' outputs to the code that begins at this channel, (HIDDEN, heads * HEAD_DIM)."""

    def made(rows: int) -> Tensor:
        weight = torch.zeros(rows, GROUPS, QUERIES, HEAD_DIM)
        for group in range(GROUPS):
            start = first + group * HEAD_DIM
            weight[start : start + HEAD_DIM, group, 0] = torch.eye(HEAD_DIM)
        return weight.reshape(rows, -1)

    return made


WEIGHTS: dict[str, Callable[[int], Tensor]] = {
    "embedding.word_embeddings.weight": embedding,
    "decoder.layers.0.self_attention.linear_qkv.weight": previous_qkv,
    "decoder.layers.0.self_attention.linear_proj.weight": projection(BEFORE),
    "decoder.layers.1.self_attention.linear_qkv.weight": matching_qkv,
    "decoder.layers.1.self_attention.linear_proj.weight": projection(FORETOLD),
    "output_layer.weight": output,
}
"""Of the parameters that are neither norms nor 0: made for as many rows as the parameter has."""
