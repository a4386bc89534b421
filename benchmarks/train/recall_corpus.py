"""Documents of random tokens that can be foretold only by who sees the right keys.

    python -m benchmarks.train.recall_corpus --out FOLDER

A document begins with needles: blocks of tokens in random order. Each is repeated once, at a
distance that grows from one needle to the next; the last repeat ends the document. Between them
are blocks that are repeated at once. A repeated token follows from the one before it and from where
that was seen first; nothing else tells it. So its loss is near 0 in a model that has learned to
look there and can, and that of a guess where a mask hides the place. Needles of all documents are
made of the same tokens: who sees another document's keys finds two answers.

FOLDER gets train.bin, train.idx, valid.bin, valid.idx (uint16). Training documents have lengths of
any size; those of validation are half a sample long, so that their needles are at known positions.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.train.code_corpus import write
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser

LENGTH = 65536
"""Tokens of a sample."""
EOD = 127
"""There are few tokens, because a model must learn first what a repeat is, and needs more data for
more of them."""
NEEDLES = 4
NEEDLE = 16
"""Tokens of a needle in a document that is long enough."""
NEEDLE_IDS, FILL_IDS = NEEDLES * NEEDLE, EOD
"""Needles have the tokens below the first, blocks between them those from there to the second."""
SHORTEST, LONGEST = 512, LENGTH // 2
"""Of training documents; the logarithm of the length is uniform."""
SAMPLES = {"train": 2000, "valid": 16}
SEED = 2026

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Repeat:
    """Where a needle of a document is repeated."""

    needle: int
    start: int
    """The first repeated token."""
    end: int

    @property
    def distance(self) -> int:
        """From a token's first place to its second."""
        return self.start - self.needle * (self.end - self.start)


def repeats(length: int) -> list[Repeat]:
    """Of the needles of a document with this many tokens, its end among them."""
    size = min(NEEDLE, length // 40)
    first = NEEDLES * size
    ends = [first + (length - 1 - first) // part for part in (32, 8, 2, 1)]
    return [Repeat(needle, end - size, end) for needle, end in enumerate(ends)]


def document(length: int, rng: np.random.Generator) -> Tokens:
    """One without the token that ends it, which is the last of `length`."""
    found = repeats(length)
    size = found[0].end - found[0].start
    needles = rng.permutation(NEEDLE_IDS)[: NEEDLES * size].reshape(NEEDLES, size)
    tokens = fill(length - 1, rng)
    tokens[: needles.size] = needles.reshape(-1)
    for repeat in found:
        tokens[repeat.start : repeat.end] = needles[repeat.needle]
    return tokens


def fill(length: int, rng: np.random.Generator) -> Tokens:
    """Blocks that are repeated at once, up to this many tokens."""
    blocks: list[Tokens] = []
    left = length
    while left > 0:
        block = NEEDLE_IDS + rng.permutation(FILL_IDS - NEEDLE_IDS)[: rng.integers(8, 17)]
        blocks += [block, block]
        left -= 2 * len(block)
    return np.concatenate(blocks)[:length]


def training_documents(rng: np.random.Generator) -> Iterator[Tokens]:
    """Without end."""
    while True:
        low, high = np.log(SHORTEST), np.log(LONGEST)
        yield document(int(np.exp(rng.uniform(low, high))), rng)


def sets() -> dict[str, Iterator[list[int]]]:
    """Documents of both sets, with the tokens that end them, one document more than is read."""
    rng = np.random.default_rng(SEED)
    valid = (document(LENGTH // 2, rng) for _ in range(2 * SAMPLES["valid"] + 1))
    return {"valid": ended(valid), "train": ended(enough(training_documents(rng)))}


def enough(documents: Iterator[Tokens]) -> Iterator[Tokens]:
    """As many as the samples need, and the token after the last one."""
    tokens = 0
    for one in documents:
        yield one
        tokens += len(one) + 1
        if tokens > SAMPLES["train"] * LENGTH:
            return


def ended(documents: Iterator[Tokens]) -> Iterator[list[int]]:
    """With the token that ends each."""
    return ([*one.tolist(), EOD] for one in documents)


def buckets() -> tuple[int, ...]:
    """Ends of buckets of positions in a document of validation: what is between the repeats, and
    all tokens of a repeat but the first, which nothing foretells, by turns."""
    ends = ((repeat.start, repeat.end - 1) for repeat in repeats(LENGTH // 2))
    return (*itertools.chain.from_iterable(ends), LENGTH)


def main() -> int:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    facts = {name: write(out / name, documents) for name, documents in sets().items()}
    print(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
