"""Archives in memory, for tests of what reads them."""

from __future__ import annotations

import io
import tarfile

MANY = {f"f{i}": bytes([65 + i % 26]) * 700 for i in range(30)}
"""Files of two blocks of an archive each."""


def tar_of(files: dict[str, bytes]) -> bytes:
    """These files, and at the end a link to one."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, text in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(text)
            archive.addfile(header, io.BytesIO(text))
        link = tarfile.TarInfo("link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "b.py"
        archive.addfile(link)
    return target.getvalue()
