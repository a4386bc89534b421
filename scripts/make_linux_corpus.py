#!/usr/bin/env python3
"""Make the corpus of the convergence runs out of Debian's Linux sources, as JSON lines.

    apt-get download linux-source-6.1                    # about 140 MB
    dpkg -x linux-source-6.1_*.deb linux
    python scripts/make_linux_corpus.py linux/usr/src/linux-source-6.1.tar.xz linux.jsonl.xz

Instead of the archive, the folder that it unpacks to gives the same file. A file is taken by its
path and content alone, so that another Debian version changes little. The text is the kernel's,
under GPL-2.0: do not commit it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from megatron_magi.text.documents import Document

TOP = "linux-source-6.1/"
PATTERNS = ("*.c", "*.h", "*.rst", "*.txt", "*.S", "*.py", "*.sh", "*.pl", "*.rs")
REGISTER_HEADERS = f"{TOP}drivers/gpu/drm/amd/include/"
"""The amdgpu register headers: hundreds of MB of #define."""
MIN_BYTES = 256
SHARE = 0.26
"""Of the range of sha256(path): about 70 million Llama-3 tokens."""


@dataclass(frozen=True)
class Written:
    """What went into the file, before compression."""

    num_documents: int
    num_bytes: int
    """Of the texts alone."""
    sha256: str
    """Of the JSON lines."""


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        chosen = chosen_documents(args.linux)
        version = next(kernel_version(d.text) for d in chosen if d.name == f"{TOP}Makefile")
        texts = without_duplicates(d for d in chosen if not d.name.endswith("Makefile"))
        partial = args.output.with_name(f".{args.output.name}.partial")
        written = write_json_lines(texts, partial, args.output.suffix == ".xz")
        partial.replace(args.output)
    except StopIteration:
        print(f"error: {args.linux} must hold the Makefile of a Linux source tree", file=sys.stderr)
        return 2
    print(f"Linux {version}: {written.num_documents:,} documents, {written.num_bytes:,} bytes")
    print(f"sha256 of the JSON lines {written.sha256}")
    print(f"wrote {args.output}, {args.output.stat().st_size:,} bytes")
    return 0


def chosen_documents(linux: Path) -> list[Document]:
    """The chosen texts and the tree's Makefile, by path, with Debian's folder in front of it."""
    files = files_of_folder(linux) if linux.is_dir() else files_of_archive(linux)
    named = (Document(TOP + name.removeprefix(TOP), text) for name, text in files)
    return sorted((d for d in named if is_chosen(d)), key=lambda d: d.name)


def files_of_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Regular files below a folder, without links."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def files_of_archive(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Regular files of a tar archive, without links."""
    with tarfile.open(archive, "r|*") as members:
        for member in members:
            content = members.extractfile(member) if member.isreg() else None
            if content is not None:
                yield member.name.removeprefix("./"), content.read()


def is_chosen(document: Document) -> bool:
    """Whether a document is the tree's Makefile, or long enough and in the share of the paths."""
    if document.name == f"{TOP}Makefile":
        return True
    if b"\0" in document.text or not any(fnmatch(document.name, p) for p in PATTERNS):
        return False
    place = int(hashlib.sha256(document.name.encode()).hexdigest(), 16) / 2**256
    is_text = len(document.text) >= MIN_BYTES and not document.name.startswith(REGISTER_HEADERS)
    return is_text and place < SHARE


def without_duplicates(documents: Iterable[Document]) -> Iterator[Document]:
    """Each text once, under its first name."""
    seen: set[bytes] = set()
    for document in documents:
        digest = hashlib.sha256(document.text).digest()
        if digest not in seen:
            seen.add(digest)
            yield document


def write_json_lines(documents: Iterable[Document], path: Path, is_packed: bool) -> Written:
    """Write {"path": ..., "text": ...} a line."""
    number, num_bytes, digest = 0, 0, hashlib.sha256()
    with lzma.open(path, "wb", preset=6) if is_packed else path.open("wb") as file:
        for document in documents:
            name, text = document.name.removeprefix(TOP), document.text.decode(errors="replace")
            line = json.dumps({"path": name, "text": text}, ensure_ascii=False) + "\n"
            file.write(line.encode())
            digest.update(line.encode())
            number += 1
            num_bytes += len(document.text)
    return Written(number, num_bytes, digest.hexdigest())


def kernel_version(makefile: bytes) -> str:
    """As in 6.1.192."""
    names = ("VERSION", "PATCHLEVEL", "SUBLEVEL")
    found = [re.search(rf"^{name} = (\d+)$", makefile.decode(), re.M) for name in names]
    return ".".join(match[1] if match else "?" for match in found)


def _parser() -> CommandParser:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("linux", type=Path, help="linux-source-6.1.tar.xz, or the unpacked folder")
    parser.add_argument("output", type=Path, help=".jsonl, or .jsonl.xz, which takes minutes")
    return parser


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
