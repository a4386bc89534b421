"""Checks Megatron's data files as they are opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_magi.launcher.session import LauncherState, hook


@hook
def wrap_open_data_file(
    launch: LauncherState, original: Any, self: Any, path_prefix: str, *args: Any, **kwargs: Any
) -> None:
    """For `IndexedDataset.__init__`: the tokens that the index promises must be in the file.

    Without mmap Megatron reads what is missing as whatever its buffer holds, so that ranks would
    train on different tokens.

    Raises:
        ValueError: the .bin file is shorter than its index says.
    """
    original(self, path_prefix, *args, **kwargs)
    file = Path(f"{path_prefix}.bin")
    if not file.is_file():  # in object storage, or a test's invention
        return
    needed, found = _promised_bytes(self), file.stat().st_size
    if found < needed:
        raise ValueError(
            f"{file} must hold the {needed} bytes of tokens that {file.with_suffix('.idx')} lists, "
            f"got {found} bytes: the file is damaged or was cut short; copy or build it again"
        )


@hook
def wrap_count_epochs(
    launch: LauncherState, original: Any, self: Any, num_tokens_per_epoch: int
) -> int:
    """For `GPTDataset._get_num_epochs`, which adds up the tokens of epochs until there are enough:
    without documents it would not end.

    Raises:
        ValueError: a share of --split has no document.
    """
    if num_tokens_per_epoch == 0 and self.num_samples is not None:
        raise ValueError(
            f"--split must leave a document of {self.dataset_path} for {self.index_split.name}, "
            f"got none; give it a larger share, or 0 (--split 100,0,0 --eval-iters 0)"
        )
    epochs: int = original(self, num_tokens_per_epoch)
    return epochs


def _promised_bytes(data: Any) -> int:
    """Where the last sequence ends; sequences follow each other."""
    index = data.index
    if not len(index.sequence_lengths):
        return 0
    return int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size
