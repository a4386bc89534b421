"""Packs text into Megatron's .bin/.idx, one document per text with its EOD, and counts it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_magi.training.data.text_source import Document
from megatron_magi.training.data.tokenizers import ByteTokenizer, Tokenizer
from megatron_magi.training.process.whole_files import written_whole
from megatron_magi.training.recipe.recipe_error import RecipeError

__all__ = ["ByteTokenizer", "CorpusStats", "Document", "pack"]

HISTOGRAM_EDGES = (50, 100, 200, 500, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Upper ends, in tokens, of the length histogram; a last bin takes what is longer."""
BATCH_BYTES = 1 << 20
"""Bytes of text that a process gets at a time; a longer document is sent alone."""
POOL_FROM_BATCHES = 8
"""The least number of batches that is read by several processes: for fewer, starting them takes
longer than they save."""


def pack(
    documents: Iterable[Document], prefix: Path, tokenizer: Tokenizer, workers: int = 1
) -> CorpusStats:
    """Write PREFIX.bin, .idx, .documents (one name per line) and .json (the stats).

    All of them or none: an error leaves the files of an earlier run as they were.

    Args:
        workers: processes that encode; the files are the same for any number.

    Raises:
        RecipeError: there is no document to pack, or one that cannot be encoded.
    """
    targets = [Path(f"{prefix}.{suffix}") for suffix in ("bin", "idx", "documents", "json")]
    with written_whole(targets) as (tokens, index, names, numbers):
        lengths = _write_tokens(documents, (tokens, index, names), tokenizer, workers)
        stats = corpus_stats(np.array(lengths), tokenizer, _sha256(tokens))
        numbers.write_text(json.dumps(asdict(stats), indent=1) + "\n")
    return stats


def _write_tokens(
    documents: Iterable[Document],
    paths: tuple[Path, Path, Path],
    tokenizer: Tokenizer,
    workers: int,
) -> list[int]:
    """Write the tokens, their index and the names; return the documents' lengths."""
    from megatron_magi.adapter.compat import require_megatron

    require_megatron()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokens, index, names = paths
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(str(tokens), dtype=dtype)
    # Names of files may hold bytes that are not UTF-8.
    with (
        builder.data_file,
        names.open("w", encoding="utf-8", errors="backslashreplace") as name_lines,
        closing(encode_documents(documents, tokenizer, dtype, workers)) as batches,
    ):
        for batch in batches:
            _add(builder, batch)
            name_lines.writelines(" ".join(name.splitlines()) + "\n" for name in batch.names)
    if not builder.sequence_lengths:
        raise RecipeError(
            "a corpus must have one document or more, got none; check the input paths and patterns"
        )
    builder.finalize(str(index))
    return list(builder.sequence_lengths)


def _add(builder: Any, batch: EncodedBatch) -> None:
    start = 0
    for length in batch.lengths:
        builder.add_document(batch.ids[start : start + length], [length])
        start += length


def packed_sha256(prefix: str | Path) -> str | None:
    """The checksum that PREFIX.json has of the packed data; None where `pack` did not write one."""
    try:
        stats = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    checksum = stats.get("sha256") if isinstance(stats, dict) else None
    return checksum if isinstance(checksum, str) else None


def _sha256(path: Path) -> str:  # hashlib.file_digest needs Python 3.11
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class CorpusStats:
    """What was packed; also written to PREFIX.json."""

    tokenizer: str
    vocab_size: int
    eod_token: int
    num_documents: int
    num_tokens: int
    length_percentiles: dict[str, int]
    """Tokens per document, its EOD included: p50, p90, p99, max."""
    length_histogram: dict[str, int]
    """Documents by upper end of their bin."""
    sha256: str
    """The checksum of PREFIX.bin."""

    def table(self) -> str:
        """Numbers and a histogram for the screen."""
        p = self.length_percentiles
        lines = [
            f"{self.num_documents:,} documents, {self.num_tokens:,} tokens "
            f"({self.tokenizer} tokenizer, vocabulary {self.vocab_size}, EOD {self.eod_token})",
            "tokens per document: " + ", ".join(f"{k} {v:,}" for k, v in p.items()),
        ]
        peak = max(self.length_histogram.values())
        for label, number in self.length_histogram.items():
            bar = "#" * round(40 * number / peak)
            lines.append(
                f"  {label:>8} {number:>8,} {100 * number / self.num_documents:5.1f}% {bar}"
            )
        return "\n".join([*lines, f"sha256 {self.sha256}"])


def corpus_stats(lengths: npt.NDArray[np.int64], tokenizer: Tokenizer, sha256: str) -> CorpusStats:
    """Statistics of documents with these lengths in tokens."""
    percentiles = {
        f"p{p}": int(np.percentile(lengths, p, method="nearest")) for p in (50, 90, 99)
    } | {"max": int(lengths.max())}
    bins = np.searchsorted(HISTOGRAM_EDGES, lengths, side="left")
    counts = np.bincount(bins, minlength=len(HISTOGRAM_EDGES) + 1).tolist()
    labels = [f"<={edge}" for edge in HISTOGRAM_EDGES] + ["longer"]
    last = max(i for i, number in enumerate(counts) if number)
    return CorpusStats(
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eod_token=tokenizer.eod,
        num_documents=len(lengths),
        num_tokens=int(lengths.sum()),
        length_percentiles=percentiles,
        length_histogram=dict(zip(labels[: last + 1], counts[: last + 1], strict=True)),
        sha256=sha256,
    )


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
"""The tokenizer of this worker process, and the type of its tokens."""


def _start_worker(tokenizer: Tokenizer, dtype: type[Any]) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process handles Ctrl-C
    _encoder = tokenizer, dtype


def _encode_in_worker(batch: list[Document]) -> EncodedBatch:
    return encode_batch(batch, *_encoder)
