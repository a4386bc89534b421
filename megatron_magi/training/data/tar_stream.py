"""Reads the files of a tar archive from a stream, and refuses an archive that breaks off."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO


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
