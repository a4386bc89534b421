"""Megatron's data files for tests that need lengths alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch


def write_documents(prefix: str | Path, lengths: Iterable[int]) -> str:
    """The prefix of a .bin and an .idx file of documents of these lengths; every token is 7."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        builder.add_document(torch.full((length,), 7), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
