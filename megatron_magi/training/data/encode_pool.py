"""Encodes documents in a pool of processes; the result is the same for any number of them."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_magi.training.data.text_source import Document
from megatron_magi.training.data.tokenizers import Tokenizer
from megatron_magi.training.recipe.recipe_error import RecipeError

BATCH_BYTES = 1 << 20
"""Bytes of text that a process gets at a time; a longer document is sent alone."""
POOL_FROM_BATCHES = 8
"""For less text, starting processes takes longer than they save."""


@dataclass(frozen=True)
class EncodedBatch:
    """Some consecutive documents."""

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens of each document, its EOD included."""
    ids: npt.NDArray[Any]
    """[sum(lengths)], of the corpus's type."""


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, dtype: type[Any], workers: int
) -> Generator[EncodedBatch, None, None]:
    """Documents in their order as ids of `dtype`, each with its EOD; close it if you leave early.

    Holds about 3 * `workers` batches of `BATCH_BYTES`, plus documents that are longer than that.

    Raises:
        RecipeError: a text gave the EOD's id, or a process died.
    """
    batches = _batches(documents)
    first = list(islice(batches, POOL_FROM_BATCHES)) if workers > 1 else []
    if len(first) < POOL_FROM_BATCHES:
        for batch in chain(first, batches):
            yield encode_batch(batch, tokenizer, dtype)
    else:
        yield from _in_pool(chain(first, batches), tokenizer, dtype, workers)


def encode_batch(batch: list[Document], tokenizer: Tokenizer, dtype: type[Any]) -> EncodedBatch:
    """One batch, in this process."""
    pieces = []
    for document in batch:
        ids = tokenizer.encode(document.text)
        if (ids == tokenizer.eod).any():
            raise RecipeError(
                f"no text may give the EOD's id {tokenizer.eod}, got it from {document.name} with "
                f"the tokenizer {tokenizer.name}; choose a special token as the EOD"
            )
        pieces.append(np.append(ids, tokenizer.eod).astype(dtype))
    names = tuple(document.name for document in batch)
    return EncodedBatch(names, tuple(map(len, pieces)), np.concatenate(pieces))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_bytes = 0
    for document in documents:
        if batch and num_bytes + len(document.text) > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(document)
        num_bytes += len(document.text)
    if batch:
        yield batch


def _in_pool(
    batches: Iterable[list[Document]], tokenizer: Tokenizer, dtype: type[Any], workers: int
) -> Generator[EncodedBatch, None, None]:
    # A fork server: its processes inherit no thread or lock of this one, and import only once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer, dtype))
    pending: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise RecipeError(
            f"every process must live until the end, got one of {workers} that died, perhaps for "
            f"want of memory; use fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: tuple[Tokenizer, type[Any]]
"""Of a worker process."""


def _start_worker(tokenizer: Tokenizer, dtype: type[Any]) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process handles Ctrl-C
    _encoder = tokenizer, dtype


def _encode_in_worker(batch: list[Document]) -> EncodedBatch:
    return encode_batch(batch, *_encoder)
