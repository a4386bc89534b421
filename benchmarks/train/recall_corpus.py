"""Documents of random tokens, whose second half only who sees the right keys can foretell.

    python -m benchmarks.train.recall_corpus --out FOLDER

The first half of a document has every token at most once. The second half repeats its blocks in
random order. So a repeated token but a block's first follows from a single key, the one behind the
token before it in the first half; every key there is needed by a single query, near or far. All
documents have the same vocabulary: who sees another document's keys finds two answers for a token
that is in both.

FOLDER gets train.bin, train.idx, valid.bin and valid.idx (uint16), of documents that are half a
sample long; of the first only one sample is read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.train.code_corpus import write
from benchmarks.train.flag_cases import EOD
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser

LENGTH = 65536
"""Tokens of a sample."""
DOCUMENT = LENGTH // 2
BLOCK = 16
SAMPLES = {"train": 1, "valid": 16}
SEED = 2026

Tokens = npt.NDArray[np.int64]


def first_repeated(length: int) -> int:
    """The position of the first repeated token, in a document of this many tokens, its end among
    them: one token and whole blocks are before it, and behind it are as many blocks. What is left
    over comes before it too."""
    return length - 1 - (length - 2) // (2 * BLOCK) * BLOCK


def document(length: int, rng: np.random.Generator, vocab: int = EOD) -> Tokens:
    """One without the token that ends it, which is the last of `length`."""
    first = rng.permutation(vocab)[: first_repeated(length)]
    blocks = (length - 1 - len(first)) // BLOCK
    repeated = first[1 : 1 + blocks * BLOCK].reshape(blocks, BLOCK)
    return np.concatenate([first, rng.permutation(repeated).reshape(-1)])


def foretold(positions: Any, length: int) -> Any:
    """Whether the token behind each position, in an array or a tensor, follows from a key, for a
    document of this length."""
    repeated = positions + 1 - first_repeated(length)
    return (repeated >= 0) & (positions + 1 < length - 1) & (repeated % BLOCK != 0)


def sets() -> dict[str, Iterator[list[int]]]:
    """Documents of both sets, with the tokens that end them, one document more than is read."""
    rng = np.random.default_rng(SEED)
    return {
        name: ([*document(DOCUMENT, rng).tolist(), EOD] for _ in range(2 * samples + 1))
        for name, samples in SAMPLES.items()
    }


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
