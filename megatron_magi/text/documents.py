"""Reads documents of text files, folders and JSON lines, one at a time."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

OPENERS: dict[str, Callable[..., Any]] = {
    ".jsonl": open,
    ".jsonl.gz": gzip.open,
    ".jsonl.xz": lzma.open,
}
"""Functions that open files of JSON lines, by the end of a name."""


@dataclass(frozen=True)
class Document:
    """A text and where it comes from."""

    name: str
    text: bytes


@dataclass(frozen=True)
class Selection:
    """Files of folders that are taken, and where a new document begins."""

    include: Sequence[str] = ("*",)
    """Patterns of file names in folders."""
    exclude: Sequence[str] = ()
    """Patterns of names of files and folders that are left out."""
    json_key: str = "text"
    """Key of the text in the object on a line of JSON."""
    split: str | None = None
    """Regular expression; a line that it matches at its start begins a new document."""


def read_documents(inputs: Sequence[Path], selection: Selection) -> Iterator[Document]:
    """Documents of all inputs; a folder is walked in sorted order, links to folders are not.

    A file is one document, a .jsonl, .jsonl.gz or .jsonl.xz file one per line. Files with a NUL
    byte are binary and left out of folders, and so are texts of white space.

    Raises:
        ValueError: an input is no file, pipe or folder, or is binary, a line has no text, or
            `split` is no expression.
    """
    starts = _starts(selection.split)
    for root in inputs:
        for path in _files(root, selection):
            name = path.relative_to(root).as_posix() if path != root else path.name
            for document in _read_file(path, name, selection.json_key, is_named=path == root):
                yield from _split(document, starts)


def _files(root: Path, selection: Selection) -> Iterator[Path]:
    if root.is_file() or root.is_fifo():
        yield root
    elif root.is_dir():
        yield from _walk(root, selection)
    else:
        raise ValueError(
            f"an input must be a file, pipe or folder, got {root}, which is none; check the path"
        )


def _walk(folder: Path, selection: Selection) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if _matches(entry.name, selection.exclude):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry, selection)
        elif entry.is_file() and _matches(entry.name, selection.include):
            yield entry


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _read_file(path: Path, name: str, key: str, *, is_named: bool) -> Iterator[Document]:
    name_lower = path.name.lower()
    opened = next((opens for end, opens in OPENERS.items() if name_lower.endswith(end)), None)
    if opened is not None:
        yield from _json_lines(opened, path, name, key)
        return
    text = path.read_bytes()
    if b"\0" not in text:
        yield Document(name, text)
    elif is_named:
        raise ValueError(
            f"an input must be text, or lines of JSON in {', '.join(OPENERS)}, got {path}, which "
            f"has a NUL byte; unpack it"
        )


def _json_lines(opened: Callable[..., Any], path: Path, name: str, key: str) -> Iterator[Document]:
    try:
        with opened(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    text = _json_text(line, key, f"{path} line {number}")
                    yield Document(f"{name}:{number}", text)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(
            f"a packed file must be whole, got {error} in {path}; fetch it again"
        ) from error


def _json_text(line: bytes, key: str, where: str) -> bytes:
    try:
        text = json.loads(line)[key]
        if isinstance(text, str):
            return text.encode("utf-8", errors="replace")
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise ValueError(
        f'a line of a .jsonl file must be an object with a text in "{key}", got {line[:60]!r} in '
        f"{where}; mend or remove the line, or name another key"
    )


def _starts(split: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(f"^(?:{split})", re.MULTILINE) if split else None
    except re.error as error:
        raise ValueError(
            f"--split must be a regular expression, got {split!r} ({error}); mend it"
        ) from None


def _split(document: Document, starts: re.Pattern[str] | None) -> Iterator[Document]:
    texts = [document.text]
    if starts:  # an expression is about letters, which may take several bytes
        whole = document.text.decode("utf-8", errors="surrogateescape")
        cuts = [0, *(m.start() for m in starts.finditer(whole) if m.start()), len(whole)]
        texts = [whole[a:b].encode("utf-8", errors="surrogateescape") for a, b in pairwise(cuts)]
    for number, text in enumerate(texts, start=1):
        if text.strip():
            yield Document(f"{document.name}#{number}" if texts[1:] else document.name, text)
