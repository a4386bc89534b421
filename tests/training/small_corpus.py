"""A few short documents to pack, and what a folder then holds."""

from __future__ import annotations

from pathlib import Path

from megatron_magi.training.data.corpus import Document

LENGTHS = (5, 40, 1, 17, 64, 3, 90, 2, 33)
DOCUMENTS = [Document(f"d{i}", b"x" * n) for i, n in enumerate(LENGTHS)]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}
