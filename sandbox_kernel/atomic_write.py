"""Replacing a file atomically: a reader, even after a crash, finds the old file or the new one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_BUFFER = 256 * 1024


@contextlib.contextmanager
def written_aside(
    folder: Path, *parts: bytes | memoryview, prefix: str = "", lasting: bool = True
) -> Iterator[Path]:
    """A temporary file (mode 0600) with this content in a folder, for the caller to rename or link.

    ``lasting``: its content is on the disk, and survives a power cut, before the caller goes on.
    """
    fd, name = tempfile.mkstemp(dir=folder, prefix=prefix)
    try:
        with open(fd, "wb", buffering=_BUFFER) as file:
            file.writelines(parts)
            file.flush()
            if lasting:
                os.fsync(fd)
        yield Path(name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def write_atomically(path: Path, content: str | bytes, *, lasting: bool = True) -> None:
    """Replace a file. Not ``lasting``: for caches, which may be lost in a power cut."""
    data = content.encode() if isinstance(content, str) else content
    with written_aside(path.parent, data, prefix=f".{path.stem}-", lasting=lasting) as temporary:
        os.replace(temporary, path)
