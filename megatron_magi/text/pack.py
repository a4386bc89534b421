"""Packs documents into Megatron's PREFIX.bin and PREFIX.idx, each with an EOD at its end."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megatron_magi.text.documents import Document
from megatron_magi.text.tokenizers import Ids, Tokenizer


def pack(documents: Iterable[Document], prefix: Path, tokenizer: Tokenizer) -> list[int]:
    """Writes PREFIX.bin and PREFIX.idx, or nothing; returns every document's number of tokens.

    Raises:
        ValueError: there is no document, the prefix names none or one
            of the files, or a text gives the EOD's id.
        OSError: the files cannot be written.
    """
    from megatron_magi.adapter.compat import require_megatron

    require_megatron()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    _check_prefix(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    unfinished = {
        suffix: prefix.with_name(f".{prefix.name}.{os.getpid()}{suffix}.partial")
        for suffix in (".bin", ".idx")
    }
    try:
        dtype = DType.optimal_dtype(tokenizer.vocab_size)
        builder = IndexedDatasetBuilder(str(unfinished[".bin"]), dtype=dtype)
        with builder.data_file:
            for document in documents:
                ids = _encoded(document, tokenizer)
                builder.add_document(ids, [len(ids)])
        if not builder.sequence_lengths:
            raise ValueError("a corpus must have a document, got none; check paths and patterns")
        builder.finalize(str(unfinished[".idx"]))
        for suffix, path in unfinished.items():
            path.replace(f"{prefix}{suffix}")
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)
    return list(builder.sequence_lengths)


def _check_prefix(prefix: Path) -> None:
    if prefix.name in ("", ".."):
        raise ValueError(
            f"a corpus must have the prefix of its files, got the folder {prefix}; add a name to it"
        )
    if prefix.suffix in (".bin", ".idx"):
        raise ValueError(
            f"a corpus must have the prefix of its files, got {prefix}; leave {prefix.suffix} out"
        )
    for path in (f"{prefix}.bin", f"{prefix}.idx"):
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def _encoded(document: Document, tokenizer: Tokenizer) -> Ids:
    ids = tokenizer.encode(document.text)
    if (ids == tokenizer.eod).any():
        raise ValueError(
            f"no text may give the EOD's id {tokenizer.eod}, got it from {document.name} with the "
            f"tokenizer {tokenizer.name}; choose a special token as the EOD"
        )
    return np.append(ids, tokenizer.eod)
