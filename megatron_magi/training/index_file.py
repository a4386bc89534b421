"""Reads Megatron's .bin/.idx files, so that looking at data needs no import of Megatron.

The format (megatron.core.datasets.indexed_dataset): magic, version, type code, numbers of sequences
and documents, int32 lengths, int64 byte offsets; the .bin holds the tokens one after another.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_magi.training.config import RecipeError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")
DTYPES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}


class IndexFile:
    """Token sequences of PREFIX.bin by number.

    Raises:
        RecipeError: PREFIX.idx is not such a file.
    """

    def __init__(self, prefix: str) -> None:
        path = Path(f"{prefix}.idx")
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise RecipeError(
                    f"data.path must be Megatron's indexed data, got another kind of file at "
                    f"{path}; make it with scripts/prepare_data.py or preprocess_data.py"
                )
            _, code, num_sequences, _ = HEADER.unpack(file.read(HEADER.size))
        index = np.memmap(path, mode="r")
        start = len(MAGIC) + HEADER.size
        self.sequence_lengths: npt.NDArray[np.int32] = np.frombuffer(
            index, np.int32, num_sequences, start
        )
        self._offsets = np.frombuffer(index, np.int64, num_sequences, start + 4 * num_sequences)
        self._tokens = np.memmap(f"{prefix}.bin", mode="r")
        self._dtype = np.dtype(DTYPES[code])

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[np.int64]:
        """int64 tokens [offset, offset + length) of one sequence; length None: to its end."""
        if length is None:
            length = int(self.sequence_lengths[index]) - offset
        start = int(self._offsets[index]) + offset * self._dtype.itemsize
        return np.frombuffer(self._tokens, self._dtype, length, start).astype(np.int64)
