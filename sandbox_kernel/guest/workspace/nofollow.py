"""Opens folders and files without following symlinks.

Hostile code fills these folders, and must not lead a reader or writer out of them: every component
is opened relative to its parent, with O_NOFOLLOW.
"""

import os
import stat
from contextlib import contextmanager
from typing import Iterator, List, Optional, Sequence, Tuple

from .tree_format import path_parts

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOCTTY", 0)
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Root:
    """A folder below which paths are opened. Keeps descriptors of the last path's folders."""

    def __init__(self, path: "str | bytes | int") -> None:
        """``path`` may be a descriptor, which this object then owns."""
        if isinstance(path, int):
            self.fd = path
        else:
            # The caller is trusted, so the root itself may be a symlink.
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._chain: List[Tuple[bytes, int]] = []

    def close(self) -> None:
        self.forget()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def forget(self) -> None:
        """Close the kept folders: they may have been moved or replaced."""
        while self._chain:
            os.close(self._chain.pop()[1])

    def folder(self, parts: Sequence[bytes], make: Optional[int] = None) -> int:
        """A descriptor of a folder, valid until the next call. ``make`` is a mode to create missing
        folders with. OSError if any component is not a folder."""
        keep = 0
        for (name, _), part in zip(self._chain, parts):
            if name != part:
                break
            keep += 1
        while len(self._chain) > keep:
            os.close(self._chain.pop()[1])
        fd = self._chain[-1][1] if self._chain else self.fd
        for part in parts[keep:]:
            try:
                inner = os.open(part, FOLDER, dir_fd=fd)
            except FileNotFoundError:
                if make is None:
                    raise
                os.mkdir(part, make, dir_fd=fd)
                inner = os.open(part, FOLDER, dir_fd=fd)
            self._chain.append((part, inner))
            fd = inner
        return fd

    def parent(self, path: str) -> Tuple[int, bytes]:
        """The ``folder`` that holds a path, and the name in it. OSError."""
        *parents, name = path_parts(path)
        return self.folder(parents), name

    def status(self, path: str) -> "Optional[os.stat_result]":
        """lstat, or None if it is missing."""
        try:
            folder, name = self.parent(path)
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def read(self, path: str) -> int:
        """A descriptor of a regular file. OSError for anything else."""
        folder, name = self.parent(path)
        fd = os.open(name, READ, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError("not a regular file")
        return fd

    def delete(self, path: str) -> int:
        """Delete a file, or a folder and its contents; the number of files."""
        self.forget()
        try:
            return remove(*self.parent(path))
        finally:
            self.forget()


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """A descriptor that is closed when the block ends."""
    try:
        yield fd
    finally:
        os.close(fd)


def remove(parent: int, name: bytes) -> int:
    """Delete an entry of a folder, with its contents; the number of files."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return 0
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=parent)
        return 1
    if status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(name, stat.S_IRWXU, dir_fd=parent)
    with closing_fd(os.open(name, FOLDER, dir_fd=parent)) as fd:
        count = sum(remove(fd, os.fsencode(inner)) for inner in os.listdir(fd))
    os.rmdir(name, dir_fd=parent)
    return count


def pread_exactly(fd: int, size: int, offset: int) -> bytes:
    """Up to ``size`` bytes: fewer only at the end of the file."""
    data = os.pread(fd, size, offset)
    while 0 < len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def pwrite_all(fd: int, data: "bytes | memoryview", offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def next_data(fd: int, offset: int, size: int) -> int:
    """Where a file has data at or behind an offset; ``size`` if there is only a hole."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError:
        return size
