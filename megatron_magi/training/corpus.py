"""Packs text into Megatron's .bin/.idx: one document per text, its EOD at its end."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_magi.training.config import RecipeError

HISTOGRAM_EDGES = (50, 100, 200, 500, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Upper ends, in tokens, of the length histogram; a last bin takes what is longer."""


class Tokenizer(Protocol):
    """Text to ids below `vocab_size`; `eod` ends a document and is never made from text."""

    name: str
    vocab_size: int
    eod: int

    def encode(self, text: bytes) -> npt.NDArray[np.int64]: ...


class ByteTokenizer:
    """A token is a byte; 256 is EOD. Needs no files and loses nothing."""

    name = "byte"
    vocab_size = 257
    eod = 256

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def decode(self, ids: npt.NDArray[np.int64]) -> bytes:
        """The bytes behind `ids`, EODs dropped."""
        return ids[ids < 256].astype(np.uint8).tobytes()


@dataclass(frozen=True)
class Document:
    """A text and where it comes from."""

    name: str
    text: bytes


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
    """Of PREFIX.bin."""

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


def read_documents(
    inputs: Iterable[Path],
    *,
    include: tuple[str, ...] = ("*",),
    exclude: tuple[str, ...] = (),
    split: str | None = None,
) -> Iterator[Document]:
    """Documents of folders, text files and .jsonl files ({"text": ...}), in a stable order.

    Args:
        inputs: files and folders; folders are walked in sorted order.
        include: file name patterns taken from folders.
        exclude: names of files and folders left out.
        split: a regular expression; a line that it matches at its start begins a new document.
    """
    start_of_piece = (
        None if split is None else re.compile(b"^(?:" + split.encode() + b")", re.MULTILINE)
    )
    for root in inputs:
        for path in _walk(root, include, exclude):
            for document in _read_file(path, root):
                yield from _split(document, start_of_piece)


def pack(documents: Iterable[Document], prefix: Path, tokenizer: Tokenizer) -> CorpusStats:
    """Write PREFIX.bin, .idx, .documents (one name a line) and .json (the stats).

    Raises:
        RecipeError: when there is no document to pack.
    """
    from megatron_magi.adapter.compat import require_megatron

    require_megatron()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    lengths, names = [], []
    for document in documents:
        ids = np.append(tokenizer.encode(document.text), tokenizer.eod)
        builder.add_document(ids, [len(ids)])
        lengths.append(len(ids))
        names.append(document.name)
    if not lengths:
        builder.data_file.close()
        Path(f"{prefix}.bin").unlink()
        raise RecipeError(
            "a corpus must have one document or more, got none; check the input paths and patterns"
        )
    builder.finalize(f"{prefix}.idx")
    stats = _stats(np.array(lengths), tokenizer, _sha256(Path(f"{prefix}.bin")))
    Path(f"{prefix}.documents").write_text("\n".join(names) + "\n", encoding="utf-8")
    Path(f"{prefix}.json").write_text(json.dumps(asdict(stats), indent=1) + "\n")
    return stats


def limit_bytes(documents: Iterable[Document], max_bytes: int | None) -> Iterator[Document]:
    """Documents until their text reaches `max_bytes`."""
    taken = 0
    for document in documents:
        if max_bytes is not None and taken >= max_bytes:
            return
        taken += len(document.text)
        yield document


def _walk(root: Path, include: tuple[str, ...], exclude: tuple[str, ...]) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    if not root.is_dir():
        raise RecipeError(
            f"an input must be a file or a folder, got {root}, which does not exist; check the path"
        )
    for entry in sorted(root.iterdir(), key=lambda p: p.name):
        if any(fnmatch(entry.name, pattern) for pattern in exclude):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry, include, exclude)
        elif entry.is_file() and any(fnmatch(entry.name, pattern) for pattern in include):
            yield entry


def _read_file(path: Path, root: Path) -> Iterator[Document]:
    name = path.name if path == root else path.relative_to(root).as_posix()
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield Document(f"{name}:{number}", _json_text(line, name, number))
        return
    text = path.read_bytes()
    if b"\0" not in text:  # a NUL byte is the mark of a binary file
        yield Document(name, text)


def _json_text(line: str, name: str, number: int) -> bytes:
    try:
        record: Any = json.loads(line)
        return str(record["text"]).encode("utf-8", errors="replace")
    except (ValueError, KeyError, TypeError):
        raise RecipeError(
            f'a line of a .jsonl file must be an object with a "text", got {line[:60]!r} in '
            f"{name} line {number}; mend or remove the line"
        ) from None


def _split(document: Document, start: re.Pattern[bytes] | None) -> Iterator[Document]:
    if start is None:
        cuts = []
    else:
        cuts = [m.start() for m in start.finditer(document.text) if m.start() > 0]
    for number, (a, b) in enumerate(
        zip([0, *cuts], [*cuts, len(document.text)], strict=True), start=1
    ):
        text = document.text[a:b]
        if text.strip():
            yield Document(f"{document.name}#{number}" if cuts else document.name, text)


def _stats(lengths: npt.NDArray[np.int64], tokenizer: Tokenizer, sha256: str) -> CorpusStats:
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


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
