"""Packed documents to train on, equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
"""The label of a document's last token, which has no next one."""


@dataclass(frozen=True)
class Packed:
    """A stream of documents; int64 [T] each, and where documents begin and the last one ends."""

    tokens: Tensor
    positions: Tensor
    """Inside of their documents."""
    labels: Tensor
    """The next token, or IGNORED."""
    bounds: list[int]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.tokens, self.positions, self.labels


def packed(tokens: np.ndarray[Any, Any], bounds: list[int], device: str = "cpu") -> Packed:
    """These tokens, cut into documents at ``bounds``."""
    positions = np.arange(len(tokens)) - np.repeat(bounds[:-1], np.diff(bounds))
    labels = np.roll(tokens, -1)
    labels[np.array(bounds[1:]) - 1] = IGNORED
    made = (torch.from_numpy(x).to(device) for x in (tokens, positions, labels))
    return Packed(*made, bounds)


def cut_at_random(
    rng: np.random.Generator, length: int, mean_document: int, multiple_of: int
) -> list[int]:
    """Bounds of documents of about this length, which begin at multiples."""
    places = np.arange(multiple_of, length, multiple_of)
    cuts = rng.choice(places, size=length // mean_document, replace=False)
    return [0, *np.sort(cuts).tolist(), length]


def shuffled(rng: np.random.Generator, lengths: Sequence[int]) -> list[int]:
    """Bounds of documents of these lengths, in a random order."""
    return [0, *np.cumsum(rng.permutation(lengths)).tolist()]
