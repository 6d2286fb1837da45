"""Files of the host: what is ours, and whether a file has what the store has of it."""

from __future__ import annotations

import os

from sandbox_kernel.guest.workspace.folders import pread_exactly
from sandbox_kernel.guest.workspace.layout import CHUNK, chunk_length, digest
from sandbox_kernel.paths import data_dir, runtime_dir
from sandbox_kernel.workspace.trees import Entry

_ZEROS = bytes(CHUNK)


def own_folders(folder: str, store: str) -> set[str]:
    """Where in a user's folder our own lie, with records, tokens and saves: no sandbox may read or
    write them. ``folder`` is a real path, ``store`` a path or a URL."""
    own = (os.path.realpath(path) for path in (data_dir(), runtime_dir(), store))
    top = folder.rstrip("/") + "/"
    return {path[len(top) :] for path in own if path.startswith(top)}


def has_contents(fd: int, entry: Entry) -> bool:
    """Whether a regular file has the contents of an entry. Holes are not read."""
    if os.fstat(fd).st_size != entry.size:
        return False
    index = 0
    for chunk in entry.chunks:
        if isinstance(chunk, int):
            if not _is_zero(fd, index * CHUNK, min((index + chunk) * CHUNK, entry.size)):
                return False
            index += chunk
            continue
        length = chunk_length(entry.size, index)
        if digest(pread_exactly(fd, length, index * CHUNK)).hex() != chunk:
            return False
        index += 1
    return True


def _is_zero(fd: int, start: int, end: int) -> bool:
    """Whether there is nothing but zeros in a part of a file."""
    while start < end:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
        except OSError:
            return os.fstat(fd).st_size >= end  # no data from here on, or it has become shorter
        if start >= end:
            return True
        data = pread_exactly(fd, min(CHUNK, end - start), start)
        if not data or data != _ZEROS[: len(data)]:
            return False
        start += len(data)
    return True
