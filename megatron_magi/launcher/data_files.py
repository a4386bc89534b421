"""Checks Megatron's data files as they are opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_magi.launcher.session import LauncherState, hook


@hook
def wrap_open_data_file(
    launch: LauncherState, original: Any, self: Any, path_prefix: str, *args: Any, **kwargs: Any
) -> None:
    """For `IndexedDataset.__init__`: the tokens that the index promises must be in the file, and
    documents in every share of --split.

    Without mmap Megatron reads what is missing as whatever its buffer holds, so that ranks would
    train on different tokens. In a share without documents it looks for samples forever.

    Raises:
        ValueError: the .bin file is shorter than its index says, or a share has no document.
    """
    original(self, path_prefix, *args, **kwargs)
    _require_documents(path_prefix, len(self.index.document_indices) - 1, launch.shares)
    file = Path(f"{path_prefix}.bin")
    if not file.is_file():  # in object storage, or a test's invention
        return
    needed, found = _promised_bytes(self), file.stat().st_size
    if found < needed:
        raise ValueError(
            f"{file} must hold the {needed} bytes of tokens that {file.with_suffix('.idx')} lists, "
            f"got {found} bytes: the file is damaged or was cut short; copy or build it again"
        )


def _require_documents(
    prefix: str, count: int, shares: Sequence[tuple[float, float] | None]
) -> None:
    """Shares are rounded to documents as Megatron does it."""
    for use, share in zip(("training", "validation", "test"), shares, strict=False):
        if share and round(share[0] * count) == round(share[1] * count):
            raise ValueError(
                f"--split must leave a document for {use}, got none of the {count} documents of "
                f"{prefix}; give it a larger share, or 0 (--split 100,0,0)"
            )


def _promised_bytes(data: Any) -> int:
    """Where the last sequence ends; sequences follow each other."""
    index = data.index
    if not len(index.sequence_lengths):
        return 0
    return int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size
