"""How many of a validation's foretold tokens a model missed: RUN/recall.json."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.train import recall_corpus
from megatron_magi.cli.parser import UsageError

COUNTS = "recall.json"
MISSED = 0.5
"""Nats above which a token is missed: one that two keys foretell has 0.7, and one that nothing
foretells more than 5."""


@dataclass(frozen=True)
class Counts:
    """Of the tokens that a key foretells, in one validation."""

    tokens: int
    missed: int
    loss: float
    """Their mean, nats."""


def read_counts(folder: Path) -> Counts:
    """Of a run's last validation.

    Raises:
        UsageError: the run has none.
    """
    path = folder / COUNTS
    if not path.is_file():
        raise UsageError(f"a validated run is needed, got no {COUNTS} in {folder}")
    return Counts(**json.loads(path.read_text()))


class RecalledTokens:
    """Counts foretold tokens of held-out documents."""

    def __init__(self, length: int = recall_corpus.DOCUMENT) -> None:
        """
        Args:
            length: tokens of every document.
        """
        self._length = length
        self._sums = torch.zeros(3, dtype=torch.float64)
        """Of tokens, of missed ones, and of losses, on the CPU."""

    def clear(self) -> None:
        """Before a validation."""
        self._sums.zero_()

    def add(self, losses: Tensor, positions: Tensor) -> None:
        """Count a microbatch.

        Args:
            losses: of tokens, in any shape.
            positions: of the same tokens in their document.

        Cost: the host waits for the device.
        """
        counted = recall_corpus.foretold(positions.reshape(-1), self._length)
        values = losses.detach().reshape(-1)[counted].double().cpu()
        sums = (len(values), int((values > MISSED).sum()), float(values.sum()))
        self._sums += torch.tensor(sums, dtype=torch.float64)

    def write(self, folder: Path, iteration: int) -> None:
        """Write the whole world's counts, on its first rank.

        Cost: an all-reduce.
        """
        sums = self._sums.to("cpu" if dist.get_backend() == "gloo" else "cuda")
        dist.all_reduce(sums)
        tokens, missed, loss = sums.tolist()
        counts = Counts(int(tokens), int(missed), loss / max(tokens, 1))
        if dist.get_rank() == 0:
            (folder / COUNTS).write_text(json.dumps(dataclasses.asdict(counts)) + "\n")
