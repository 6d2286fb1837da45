"""Claims: which server a kernel belongs to, and whether that server still lives.

Each server holds a lock on a file of its own for as long as its process lives, however it ends.
Kernels name the server they belong to. Whoever gets the lock of another server knows that it is
dead and may take its kernels; while it does, nobody else can.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from sandbox_kernel.paths import data_dir, private_dir


class Claim:
    """This server's own lock. POSIX locks, not flock: a forked child does not inherit them."""

    def __init__(self) -> None:
        self.server = secrets.token_hex(8)
        self._path = _path(self.server)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        """The server is about to end: its kernels are for the next one. Idempotent."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def taking_over(server: str) -> Iterator[bool]:
    """True if that server is dead. Nobody else may take its kernels while this lasts."""
    path = _path(server)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
        path.unlink(missing_ok=True)
    finally:
        os.close(fd)


def known_servers() -> set[str]:
    """Servers that have a lock, and dead ones that have left theirs."""
    return {path.stem for path in _folder().glob("*.lock")}


def _path(server: str) -> Path:
    return _folder() / f"{server}.lock"


def _folder() -> Path:
    return private_dir(data_dir() / "servers")
