"""Reads Megatron's .bin/.idx files, so that looking at data needs no import of Megatron.

The format (megatron.core.datasets.indexed_dataset): magic, version, type code, numbers of sequences
and documents, int32 lengths, int64 byte offsets, int64 first sequences of the documents; the .bin
holds the tokens one after another. So every number but the tokens follows from the lengths and is
compared with them when the files are opened; a damaged or truncated file is an error then.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_magi.training.recipe.recipe_error import RecipeError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<QBQQ")
START = len(MAGIC) + HEADER.size
"""Byte of the first length."""
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Types of tokens by code; the format also has 6 and 7, floating point numbers."""
BLOCK = 1 << 20
"""Sequences checked at a time: the checks take some ten MiB, whatever the corpus."""


def damaged_data(path: Path | str, what: str) -> RecipeError:
    """The error for a data file that is not as it was written.

    Args:
        what: what was found, and at which byte, sequence or token.
    """
    return RecipeError(
        f"packed data must be as it was written, got {path} with {what}; copy it again, or pack "
        f"it again with megatron-magi data"
    )


class IndexFile:
    """Token sequences of PREFIX.bin by number.

    Args:
        prefix: of both files.
        least_length: tokens that every sequence has; 0 takes Megatron's empty documents.

    Raises:
        RecipeError: a file is missing, cannot be read, or is damaged.

    Cost: reads PREFIX.idx once, and only the size of PREFIX.bin.
    """

    def __init__(self, prefix: str, least_length: int = 1) -> None:
        self._least_length = least_length
        self.index_path, self.tokens_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        index = _mapped(self.index_path)
        code, n, num_documents = _read_header(index, self.index_path)
        self._dtype = np.dtype(DTYPES[code])
        begin = START + 4 * n
        self.sequence_lengths: npt.NDArray[np.int32] = np.frombuffer(index, np.int32, n, START)
        self._offsets = np.frombuffer(index, np.int64, n, begin)
        self._check_documents(np.frombuffer(index, np.int64, num_documents, begin + 8 * n))
        num_bytes = self._check_offsets()
        self._tokens = _mapped(self.tokens_path)
        if len(self._tokens) != num_bytes:
            raise damaged_data(
                self.tokens_path,
                f"{len(self._tokens):,} bytes instead of the {num_bytes:,} of {self.index_path}",
            )

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[np.int64]:
        """int64 tokens [offset, offset + length) of one sequence; length None: to its end."""
        if length is None:
            length = int(self.sequence_lengths[index]) - offset
        start = self.byte_of(index, offset)
        return np.frombuffer(self._tokens, self._dtype, length, start).astype(np.int64)

    def byte_of(self, index: int, offset: int) -> int:
        """Where a token of a sequence begins in PREFIX.bin, for messages."""
        return int(self._offsets[index]) + offset * self._dtype.itemsize

    def _check_offsets(self) -> int:
        """Compare the offsets with the lengths; return the bytes of all tokens."""
        total = 0
        for first in range(0, len(self), BLOCK):
            lengths = self.sequence_lengths[first : first + BLOCK].astype(np.int64)
            least = self._least_length
            self._refuse(lengths < least, first, "length", lengths, f"at least {least}")
            ends = total + np.cumsum(lengths * self._dtype.itemsize)
            begins = np.concatenate([[total], ends[:-1]])
            offsets = self._offsets[first : first + BLOCK]
            self._refuse(offsets != begins, first, "offset", offsets, "where the last one ends")
            total = int(ends[-1])
        return total

    def _check_documents(self, documents: npt.NDArray[np.int64]) -> None:
        """Check the first sequence of every document, in order, and the total at the end."""
        n = len(self)
        for first in range(0, len(documents) - 1, BLOCK):
            begins = documents[first : first + BLOCK + 1]
            self._refuse(np.diff(begins) < 0, first, "document", begins, "at most the next one")
        if int(documents[0]) != 0 or int(documents[-1]) != n:
            raise damaged_data(
                self.index_path,
                f"documents from sequence {documents[0]} to {documents[-1]} instead of 0 to {n}",
            )

    def _refuse(
        self,
        wrong: npt.NDArray[np.bool_],
        first: int,
        noun: str,
        values: npt.NDArray[np.int64],
        needed: str,
    ) -> None:
        if wrong.any():
            at = int(np.argmax(wrong))
            what = f"{noun} {values[at]} of number {first + at}, which must be {needed}"
            raise damaged_data(self.index_path, what)


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file, read when they are used."""
    try:
        if path.stat().st_size == 0:
            raise damaged_data(path, "no byte in it")
        return np.memmap(path, mode="r")
    except OSError as error:
        raise RecipeError(
            f"data.path must be the prefix of two files that can be read, got {error} for {path}; "
            f"check the path and its permissions"
        ) from error


def _read_header(index: npt.NDArray[np.uint8], path: Path) -> tuple[int, int, int]:
    """Type code, number of sequences and length of the list of documents, if the size fits them."""
    start = index[:START].tobytes()
    if start[: len(MAGIC)] != MAGIC:
        raise RecipeError(
            f"data.path must be Megatron's indexed data, got another kind of file at {path}, which "
            f"begins with {start[: len(MAGIC)]!r}; make it with megatron-magi data or "
            f"preprocess_data.py"
        )
    if len(start) < START:
        raise damaged_data(path, f"{len(start)} bytes, fewer than the {START} of its header")
    version, code, n, num_documents = HEADER.unpack(start[len(MAGIC) :])
    if version != VERSION:
        raise damaged_data(path, f"version {version} at byte {len(MAGIC)} instead of {VERSION}")
    if code not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise damaged_data(path, f"type code {code} at byte {len(MAGIC) + 8}, not one of {known}")
    if n < 1 or num_documents < 2:
        raise damaged_data(path, f"{n} sequences and {num_documents} document marks in its header")
    size = START + 12 * n + 8 * num_documents
    # Corpora of text and pictures have one more byte per sequence, its mode.
    if len(index) not in (size, size + n):
        raise damaged_data(path, f"{len(index):,} bytes instead of the {size:,} of its header")
    return code, n, num_documents
