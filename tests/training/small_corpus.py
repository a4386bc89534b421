"""Packed documents with their names and checksum, which a run of the trainer reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from megatron_magi.text.documents import Document
from megatron_magi.text.pack import pack as pack_tokens
from megatron_magi.text.tokenizers import ByteTokenizer

__all__ = ["ByteTokenizer", "Document", "contents", "pack"]


def pack(documents: Iterable[Document], prefix: Path, tokenizer: ByteTokenizer) -> None:
    """Write also PREFIX.documents and PREFIX.json, as earlier versions of the packer did."""
    documents = list(documents)
    pack_tokens(documents, prefix, tokenizer)
    Path(f"{prefix}.documents").write_text("".join(f"{d.name}\n" for d in documents))
    checksum = hashlib.sha256(Path(f"{prefix}.bin").read_bytes()).hexdigest()
    Path(f"{prefix}.json").write_text(json.dumps({"sha256": checksum, "eod_token": tokenizer.eod}))


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}
