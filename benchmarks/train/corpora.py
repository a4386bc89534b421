"""Megatron data files for pretrain.py: the standard library's sources, or drawn documents."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

TOKENS = 26_000_000
"""At least as many in a corpus of drawn documents: no run reads one twice."""
END = 256
"""Token after a source file."""
HIGHEST = 16_000
"""Greater than all drawn tokens."""


def corpus(documents: str | None, folder: Path) -> Path:
    """Write a data file of one document an entry and return its prefix; Megatron is importable.

    Args:
        documents: a distribution of benchmarks/planner/plans.py, whose tokens are random; None for
            the bytes of the standard library's sources.
        folder: where the files go.
    """
    entries = _sources() if documents is None else _drawn(documents)
    return _write(folder / (documents or "corpus"), entries)


def _sources() -> Iterator[np.ndarray]:
    for source in sorted(Path(os.__file__).parent.glob("*.py")):
        yield np.append(np.frombuffer(source.read_bytes(), dtype=np.uint8), np.uint16(END))


def _drawn(name: str) -> Iterator[np.ndarray]:
    from benchmarks.planner.layouts import documents

    rng, left = np.random.default_rng(0), TOKENS
    for length in documents(name).sequence_lengths:
        yield rng.integers(0, HIGHEST, length)
        left -= length
        if left < 0:
            return


def _write(prefix: Path, entries: Iterable[np.ndarray]) -> Path:
    import torch

    from megatron_magi import adapter  # noqa: F401  prepares the import of Megatron

    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # isort: skip

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for tokens in entries:
        builder.add_document(torch.from_numpy(tokens.astype(np.int64)), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix
