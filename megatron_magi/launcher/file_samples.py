"""Document boundaries of a Megatron data file's samples, read from its index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_magi.checks import integer

SEED = 1234
"""Megatron's default --seed."""


class FileSamples:
    """Samples cut as Megatron's GPT data set cuts them: documents in a random order, joined end to
    end, cut every `seq_length` tokens, and shuffled.

    Both orders are drawn with the job's seed, but they are not the job's own, which also depend on
    the split, the blend and the number of samples. The end of the file that fills no sample is left
    out.

    Args:
        file: an IndexedDataset of Megatron, or anything with its `sequence_lengths` and `get`.
        eod: token that ends a document inside a sequence of the file; None means that every
            sequence of the file is a document.

    Raises:
        ValueError: the file holds less than a sample, or a sample is to have no token.

    Cost: reads the index, 4 bytes a document; tokens only with `eod`.
    """

    def __init__(
        self, file: Any, seq_length: int, *, seed: int = SEED, eod: int | None = None
    ) -> None:
        self.seq_length, self.eod = integer(seq_length, "--seq-length", 1), eod
        # Megatron's arrays are views of a mapped file: they end with this object.
        self._file = file
        lengths = np.asarray(self._file.sequence_lengths).astype(np.int64)
        random = np.random.RandomState(seed)
        self._documents = random.permutation(np.flatnonzero(lengths))
        self._ends = np.cumsum(lengths[self._documents])
        if len(self) == 0:
            total = int(self._ends[-1]) if len(self._ends) else 0
            raise ValueError(
                f"a data file must hold a sample of {seq_length:,} tokens, got {total:,}; "
                f"set a smaller --seq-length"
            )
        self.places = random.permutation(len(self))
        """int64 [len(self)]: which piece of the joined documents each sample is."""

    def __len__(self) -> int:
        """The number of samples in one pass over the file."""
        return int(self._ends[-1]) // self.seq_length if len(self._ends) else 0

    def boundaries(self, number: int) -> npt.NDArray[np.int64]:
        """int64 [num_documents + 1]: prefix sums of the document lengths of one sample; numbers
        beyond the last sample begin again."""
        begin = int(self.places[number % len(self)]) * self.seq_length
        first, last = np.searchsorted(self._ends, (begin, begin + self.seq_length), side="right")
        inner = self._ends[first:last] - begin
        if self.eod is not None:
            inner = np.concatenate([inner, self._after_eod(begin)])
        return np.unique(np.concatenate([[0], inner, [self.seq_length]])).astype(np.int64)

    def _after_eod(self, begin: int) -> npt.NDArray[np.int64]:
        """Places in the sample that begins at this token of the file, one behind each EOD."""
        place, parts = begin, []
        while place < begin + self.seq_length:
            index = int(np.searchsorted(self._ends, place, side="right"))
            end = min(int(self._ends[index]), begin + self.seq_length)
            document = int(self._documents[index])
            offset = place - (int(self._ends[index - 1]) if index else 0)
            parts.append(self._file.get(document, offset=offset, length=end - place))
            place = end
        return np.flatnonzero(np.concatenate(parts) == self.eod) + 1


def open_index(prefix: str) -> Any:
    """Megatron's IndexedDataset of PREFIX.bin and PREFIX.idx.

    Raises:
        ValueError: there are no such files, or they cannot be read.
        ImportError: megatron-core is missing.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    import megatron_magi.adapter  # noqa: F401  prepares the import of Megatron

    missing = [s for s in (".bin", ".idx") if not Path(f"{prefix}{s}").is_file()]
    if missing:
        raise ValueError(
            f"data must be the prefix of a .bin and an .idx file, got {prefix} without "
            f"{' and '.join(missing)}; pass the path without the suffix"
        )
    file = IndexedDataset.__new__(IndexedDataset)
    file.index = file.bin_reader = None  # its __del__ fails without them after an error
    try:
        file.__init__(prefix)
    except Exception as error:  # damaged bytes may cause any error
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"a data file must have Megatron's index, got {prefix}.idx ({said}); write it again"
        ) from error
    lengths = np.asarray(file.sequence_lengths)
    named = int(lengths.sum(dtype=np.int64)) * file.index.dtype_size
    held = Path(f"{prefix}.bin").stat().st_size
    if (lengths < 0).any() or named > held:
        raise ValueError(
            f"a data file must hold the {named:,} bytes of its index, in documents of at least 0, "
            f"got {held:,} in {prefix}.bin; write both again"
        )
    return file
