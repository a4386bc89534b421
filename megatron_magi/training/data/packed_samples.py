"""Packed samples from Megatron's .bin/.idx files, with their document boundaries.

One epoch is all documents in a seeded order, concatenated and cut every `seq_length` tokens.
Sample n is a function of (files, seed, seq_length, n) alone: no layout of processes changes it.
A document cut at a sample's end continues in another sample, where it counts as a document of its
own. A document's last token is its EOD; the label after it belongs to the next document.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megatron_magi.core.mask.builders import (
    block_causal,
    causal,
    cu_seqlens_from_eod,
    from_cu_seqlens,
)
from megatron_magi.core.mask.mask import AttnMask
from megatron_magi.training.data.index_file import IndexFile
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_values import DataConfig

T = TypeVar("T")
SUFFIXES = (".bin", ".idx")
"""What follows the prefix in the names of the data files."""


@dataclass(frozen=True)
class PackedSample:
    """One microbatch in global order, before it is spread over the context-parallel ranks."""

    index: int
    """Number of the sample in the run's order."""
    tokens: npt.NDArray[np.int64]
    """int64 [seq_length]"""
    labels: npt.NDArray[np.int64]
    """int64 [seq_length]: labels[i] is the token after tokens[i]."""
    loss_mask: npt.NDArray[np.float32]
    """float32 [seq_length]: 0 where the label is another document's first token."""
    cu_seqlens: npt.NDArray[np.int32]
    """int32 [num_documents + 1]"""
    documents: tuple[int, ...]
    """Indices in the .idx file, for messages."""


class PackedDataset:
    """An endless sequence of `PackedSample`s, reshuffled every epoch and indexed by sample number.

    Args:
        held_out: share of the documents that belong to validation, see `is_held_out`.
        validation: take those documents instead of the others.
        vocab_size: of the model; every token that is read must be below it. None: unknown.
        checks_ends: whether documents must end with `eod_token`. Without it use `boundaries` alone.

    Raises:
        RecipeError: if the files are missing, damaged, too small, or do not end documents with
            `eod_token`; while reading, if a token or the end of a document is wrong.
    """

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        held_out: float = 0.0,
        validation: bool = False,
        vocab_size: int | None = None,
        checks_ends: bool = True,
    ) -> None:
        self.config = config
        self.seed = seed
        self.vocab_size = vocab_size
        self.indexed = _open_indexed(config, checks_ends)
        self.lengths = np.asarray(self.indexed.sequence_lengths, dtype=np.int64)
        mine = is_held_out(len(self.lengths), held_out) == validation
        self.documents = np.flatnonzero(mine)
        self.num_tokens = int(self.lengths[self.documents].sum())
        self.samples_per_epoch = (self.num_tokens - 1) // config.seq_length
        if self.samples_per_epoch < 1:
            split = "" if not held_out else " for validation" if validation else " for training"
            raise RecipeError(
                f"data.path must hold more tokens than data.seq_length {config.seq_length}{split}, "
                f"got {self.num_tokens} in {config.path}; pack more text, shorten the samples"
                + (" or change validation.fraction" if held_out else "")
            )

    def __getitem__(self, index: int) -> PackedSample:
        epoch, number = divmod(index, self.samples_per_epoch)
        documents, starts, samples = _epoch_order(self, epoch)
        begin = int(samples[number]) * self.config.seq_length
        stream, used = self._read(documents, starts, begin, self.config.seq_length + 1)
        tokens, labels = stream[:-1], stream[1:]
        is_eod = tokens == self.config.eod_token
        across = is_eod if self.config.mask_across_documents else np.zeros_like(is_eod)
        cu_seqlens = cu_seqlens_from_eod(np.flatnonzero(is_eod), len(tokens))
        return PackedSample(index, tokens, labels, (~across).astype(np.float32), cu_seqlens, used)

    def boundaries(self, index: int) -> npt.NDArray[np.int32]:
        """int32 [num_documents + 1]: a sample's `cu_seqlens`, from the index; no token is read.

        An EOD inside a document, which this package's packer refuses, is not seen here.
        """
        epoch, number = divmod(index, self.samples_per_epoch)
        _, starts, samples = _epoch_order(self, epoch)
        begin = int(samples[number]) * self.config.seq_length
        end = begin + self.config.seq_length
        inner = starts[np.searchsorted(starts, begin, "right") : np.searchsorted(starts, end)]
        ends = np.concatenate([[begin], inner, [end]]) - begin
        return np.unique(ends).astype(np.int32)  # a document may be empty

    def _read(
        self,
        documents: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        begin: int,
        num_tokens: int,
    ) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
        """Tokens [begin, begin + num_tokens) of an epoch's stream and the documents they span."""
        slot = int(np.searchsorted(starts, begin, side="right")) - 1
        pieces, used, missing = [], [], num_tokens
        offset = begin - int(starts[slot])
        while missing:
            document = int(documents[slot])
            length = min(missing, int(self.lengths[document]) - offset)
            if length:
                pieces.append(self._piece(document, offset, length))
                used.append(document)
            missing, offset, slot = missing - length, 0, slot + 1
        return np.concatenate(pieces), tuple(used)

    def _piece(self, document: int, offset: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens of one document, checked as they are read: a corpus may be too large for more."""
        tokens = self.indexed.get(document, offset, length)
        wrong = tokens < 0
        if self.vocab_size is not None:
            wrong |= tokens >= self.vocab_size
        if wrong.any():
            at = int(np.argmax(wrong))
            byte = self.indexed.byte_of(document, offset + at)
            limit = "an id" if self.vocab_size is None else f"one of the {self.vocab_size:,} ids"
            raise RecipeError(
                f"every token must be {limit} in the model's vocabulary, got {tokens[at]} at byte "
                f"{byte:,} of {self.config.path}.bin, in document {document}; set "
                f"model.vocab_size to the tokenizer's, or pack the text again"
            )
        if offset + length == self.lengths[document]:
            _check_end(int(tokens[-1]), document, self.config)
        return tokens

    def document_names(self, sample: PackedSample) -> list[str]:
        """Names of a sample's documents where PREFIX.documents has them, else their numbers."""
        names = _read_names(self.config.path)
        return [
            f"{d} ({names[d]})" if names is not None and d < len(names) else str(d)
            for d in sample.documents
        ]


def mask_of_documents(cu_seqlens: npt.NDArray[np.int32], config: DataConfig) -> AttnMask:
    """The attention mask of a sample with these documents, int32 [num_documents + 1]."""
    num_tokens = int(cu_seqlens[-1])
    if config.mask == "block_causal":
        assert config.block_tokens is not None, "checked with the recipe"
        whole, rest = divmod(num_tokens, config.block_tokens)
        blocks = [config.block_tokens] * whole + [rest] * (rest > 0)
        return block_causal(blocks, window=config.block_window)
    if config.mask == "causal" and config.window is None:
        return causal(num_tokens)
    if config.mask == "causal":
        cu_seqlens = np.array([0, num_tokens], dtype=np.int32)
    left = -1 if config.window is None else config.window - 1
    return from_cu_seqlens(_boundaries(cu_seqlens, config), causal=True, window_size=(left, 0))


def _boundaries(cu_seqlens: npt.NDArray[np.int32], config: DataConfig) -> npt.NDArray[np.int32]:
    """Document boundaries for attention: the sample's, or those of the control."""
    if not config.moved_boundary:
        return cu_seqlens
    return move_boundary(cu_seqlens, config.moved_boundary)


def move_boundary(cu_seqlens: npt.NDArray[np.int32], shift: int) -> npt.NDArray[np.int32]:
    """The first inner boundary moved by `shift` tokens, no further than its neighbours."""
    moved = cu_seqlens.copy()
    if len(moved) > 2:
        moved[1] = np.clip(moved[1] + shift, moved[0], moved[2])
    return moved


def is_held_out(num_documents: int, fraction: float) -> npt.NDArray[np.bool_]:
    """bool [num_documents], True for about `fraction` of them; a function of the number alone.

    A multiplicative hash spreads the chosen ones evenly: of n documents, n * fraction +- 2.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    spread = np.arange(1, num_documents + 1, dtype=np.uint64) * golden
    return spread / 2.0**64 < fraction


def document_numbers(sample: PackedSample, config: DataConfig) -> npt.NDArray[np.int32]:
    """int32 [seq_length]: which document a token attends in; 0 for all under data.mask causal."""
    if config.mask == "causal":
        return np.zeros(len(sample.tokens), dtype=np.int32)
    lengths = np.diff(_boundaries(sample.cu_seqlens, config))
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def microbatch_indices(
    global_batch_size: int, dp_rank: int, dp_size: int, first: int = 0, is_reversed: bool = False
) -> Iterator[int]:
    """Places of one data-parallel rank in a run; step s has `batch` from first + s * batch on.

    The sample at a place has the place as its number, unless a `StepOrder` moved it.

    `is_reversed` takes the places of a step from the last to the first, so that other replicas and
    other microbatches hold them.
    """
    numbers = range(global_batch_size)[:: -1 if is_reversed else 1]
    for step in count():
        for number in numbers[dp_rank::dp_size]:
            yield first + step * global_batch_size + number


def prefetch(make: Callable[[int], T], indices: Iterator[int], depth: int) -> Iterator[T]:
    """Yield make(i) for i in indices, computed up to `depth` ahead in one thread, in order."""
    if depth < 1:
        yield from map(make, indices)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="microbatch") as pool:
        pending = deque(pool.submit(make, index) for index in islice(indices, depth))
        while pending:
            ready = pending.popleft().result()
            pending.extend(pool.submit(make, index) for index in islice(indices, 1))
            yield ready


def has_files(config: DataConfig) -> bool:
    """Whether both data files are there."""
    return all(Path(config.path + suffix).is_file() for suffix in SUFFIXES)


def check_files(config: DataConfig) -> None:
    """Raise RecipeError unless both data files are there; cheap, for a check before the start."""
    for suffix in SUFFIXES:
        if not Path(config.path + suffix).is_file():
            raise RecipeError(
                f"data.path must be the prefix of a .bin and an .idx file, got {config.path!r} and "
                f"no {config.path + suffix}; make them with megatron-magi data"
            )


@lru_cache(maxsize=2)
def _epoch_order(
    dataset: PackedDataset, epoch: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Document order, where each begins in the stream, and sample order of one epoch.

    RandomState's stream is frozen across NumPy versions; Generator's is not.
    """
    rng = np.random.RandomState([dataset.seed & 0xFFFFFFFF, epoch])
    documents = dataset.documents[rng.permutation(len(dataset.documents))]
    starts = np.concatenate([[0], np.cumsum(dataset.lengths[documents])[:-1]])
    return documents, starts, rng.permutation(dataset.samples_per_epoch)


@lru_cache(maxsize=4)
def _read_names(prefix: str) -> list[str] | None:
    path = Path(f"{prefix}.documents")
    return path.read_text("utf-8", "replace").splitlines() if path.is_file() else None


def _open_indexed(config: DataConfig, checks_ends: bool) -> IndexFile:
    check_files(config)
    indexed = IndexFile(config.path, least_length=1 if checks_ends else 0)
    for document in range(min(len(indexed), 16) if checks_ends else 0):
        last = int(indexed.sequence_lengths[document]) - 1
        _check_end(int(indexed.get(document, last, 1)[0]), document, config)
    return indexed


def _check_end(last: int, document: int, config: DataConfig) -> None:
    if last != config.eod_token:
        raise RecipeError(
            f"every document must end with data.eod_token {config.eod_token}, got {last} at "
            f"the end of document {document} of {config.path}; set data.eod_token (plan and viz: "
            f"leave out --eod-token), or pack with an EOD (--append-eod)"
        )
