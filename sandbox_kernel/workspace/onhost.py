"""Files of the host, compared with what the store has of them."""

from __future__ import annotations

import os

from sandbox_kernel.guest.workspace.folders import pread_exactly
from sandbox_kernel.guest.workspace.layout import CHUNK, chunk_length, digest
from sandbox_kernel.workspace.trees import Entry

_ZEROS = bytes(CHUNK)


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
