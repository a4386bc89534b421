"""Packs text into Megatron's .bin/.idx: one document per text, its EOD at its end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_magi.training.data.corpus_stats import CorpusStats, corpus_stats
from megatron_magi.training.data.encode_pool import EncodedBatch, encode_documents
from megatron_magi.training.data.text_source import Document
from megatron_magi.training.data.tokenizers import ByteTokenizer, Tokenizer
from megatron_magi.training.process.whole_files import written_whole
from megatron_magi.training.recipe.recipe_error import RecipeError

__all__ = ["ByteTokenizer", "CorpusStats", "Document", "pack"]


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


def _sha256(path: Path) -> str:  # hashlib.file_digest needs Python 3.11
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
