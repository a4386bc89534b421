"""Reads documents out of text files, folders, JSON lines and tar archives, one at a time."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, Any

from megatron_magi.training.recipe.recipe_error import RecipeError

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz")
BROKEN_STREAM = (EOFError, OSError, tarfile.TarError, lzma.LZMAError, zlib.error)
"""The errors of reading a truncated or damaged file."""


@dataclass(frozen=True)
class Document:
    """A text and where it comes from."""

    name: str
    text: bytes


@dataclass(frozen=True)
class InputFile:
    """A file to read and the name of its document."""

    path: Path
    name: str
    is_archive: bool
    """A tar archive that was named as an input; in folders they are files like others."""


@dataclass(frozen=True)
class Selection:
    """Which files of the inputs are taken, and where a new document begins."""

    include: tuple[str, ...] = ("*",)
    """Patterns of file names, in folders and archives."""
    exclude: tuple[str, ...] = ()
    """Patterns of names of files and folders left out, in folders and archives."""
    links: bool = True
    """Take files in folders that are symbolic links; in archives they never are."""
    json_key: str = "text"
    """The key of the text in the object on a line of JSON."""
    split: str | None = None
    """A regular expression; a line that it matches at its start begins a new document."""

    def takes_member(self, path: str) -> bool:
        """Whether a path inside an archive is taken."""
        parts = PurePosixPath(path).parts
        return _matches(parts[-1], self.include) and not any(
            _matches(part, self.exclude) for part in parts
        )


class TextSource:
    """Documents of files and folders in a stable order; iterate over it, as often as you like.

    Folders are walked in sorted order. A file is one document, a .jsonl file one per line, each
    also compressed as .gz or .xz. A tar archive that is an input is read like a folder, in its own
    order.
    Binary files (with a NUL byte) are left out, archives in folders among them.

    Raises:
        RecipeError: an input does not exist; while iterating, a file is damaged or truncated.
    """

    def __init__(self, inputs: Iterable[Path], selection: Selection | None = None) -> None:
        self.selection = selection or Selection()
        self.files = [file for root in inputs for file in _input_files(root, self.selection)]
        self.num_bytes = sum(file.path.stat().st_size for file in self.files)
        self.num_binary = 0
        self._bytes_done = 0
        self._open_file: IO[bytes] | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of the input files read so far, of `num_bytes`."""
        return self._bytes_done + (self._open_file.tell() if self._open_file else 0)

    def __iter__(self) -> Iterator[Document]:
        self._bytes_done = self.num_binary = 0
        starts = _starts(self.selection.split)
        for file in self.files:
            for document in self._read_file(file):
                yield from _split(document, starts)
            self._bytes_done += file.path.stat().st_size

    def _read_file(self, file: InputFile) -> Iterator[Document]:
        read = self._read_archive if file.is_archive else self._read_stream
        try:
            with file.path.open("rb") as self._open_file:
                yield from read(file.name, self._open_file)
        except BROKEN_STREAM as error:
            raise RecipeError(
                f"an input must be readable to its end, got {file.path}, which is damaged or "
                f"truncated ({error}); make or fetch it again"
            ) from error
        finally:
            self._open_file = None

    def _read_archive(self, name: str, packed: IO[bytes]) -> Iterator[Document]:
        for member, content in tar_members(_unpacked(name, packed)):
            if self.selection.takes_member(member):
                yield from self._read_stream(member, content)

    def _read_stream(self, name: str, packed: IO[bytes]) -> Iterator[Document]:
        stream = _unpacked(name, packed)
        if name.removesuffix(".gz").removesuffix(".xz").endswith(".jsonl"):
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    text = _json_text(line, self.selection.json_key, f"{name} line {number}")
                    yield Document(f"{name}:{number}", text)
            return
        text = stream.read()
        if b"\0" in text:  # the mark of a binary file
            self.num_binary += 1
        else:
            yield Document(name, text)


def _input_files(root: Path, selection: Selection) -> Iterator[InputFile]:
    if root.is_file():
        yield InputFile(root, root.name, root.name.endswith(ARCHIVES))
        return
    if not root.is_dir():
        raise RecipeError(
            f"an input must be a file or a folder, got {root}, which does not exist; check the path"
        )
    for path in _walk(root, selection):
        yield InputFile(path, path.relative_to(root).as_posix(), is_archive=False)


def _walk(folder: Path, selection: Selection) -> Iterator[Path]:
    for entry in sorted(folder.iterdir(), key=lambda p: p.name):
        if _matches(entry.name, selection.exclude):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry, selection)
        elif not entry.is_file() or (entry.is_symlink() and not selection.links):
            continue
        elif _matches(entry.name, selection.include):
            yield entry


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _unpacked(name: str, packed: IO[bytes]) -> Any:
    # Not left to tarfile, whose own decompression takes a truncated file for its end.
    if name.endswith((".gz", ".tgz")):
        return gzip.open(packed)
    return lzma.open(packed) if name.endswith((".xz", ".txz")) else packed


def _json_text(line: bytes, key: str, where: str) -> bytes:
    try:
        text = json.loads(line)[key]
        if isinstance(text, str):
            return text.encode("utf-8", errors="replace")
    except (ValueError, LookupError, TypeError):
        pass
    raise RecipeError(
        f'a line of a .jsonl file must be an object with a text in "{key}", got {line[:60]!r} in '
        f"{where}; mend or remove the line, or name another key"
    )


def _starts(split: str | None) -> re.Pattern[bytes] | None:
    if split is None:
        return None
    try:
        return re.compile(b"^(?:" + split.encode() + b")", re.MULTILINE)
    except re.error as error:
        raise RecipeError(
            f"split must be a regular expression, got {split!r} ({error}); mend it"
        ) from None


def _split(document: Document, starts: re.Pattern[bytes] | None) -> Iterator[Document]:
    cuts = [m.start() for m in starts.finditer(document.text) if m.start()] if starts else []
    ends = [*cuts, len(document.text)]
    for number, (a, b) in enumerate(zip([0, *cuts], ends, strict=True), start=1):
        text = document.text[a:b]
        if text.strip():
            yield Document(f"{document.name}#{number}" if cuts else document.name, text)


class _StrictTarInfo(tarfile.TarInfo):
    """A header that is checked, because tarfile takes a damaged one for the archive's end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _StrictTarInfo:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise  # the end mark
        except tarfile.HeaderError as error:
            where = f"no right header at byte {archive.offset}"
            raise tarfile.ReadError(f"{where}: {error}") from error


def tar_members(stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    """Names and contents of the regular files in an uncompressed archive, in its order.

    Read each content before the next one. Links are left out, because the files that they name are
    in the archive themselves.

    Raises:
        tarfile.ReadError: a header is damaged, or the archive ends without its end mark.
    """
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictTarInfo) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None:
                yield member.name.removeprefix("./"), content
            # Otherwise tarfile keeps every member in memory.
            archive.members = []  # type: ignore[attr-defined]
