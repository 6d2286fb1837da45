"""Locks of servers: which server a kernel belongs to, and whether that server still lives.

Each server holds a lock on its own file as long as its process lives. Kernels name the server that
they belong to. A process that gets another server's lock knows that this server is dead, and may
take its kernels; nobody else can meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from sandbox_kernel import host_identity
from sandbox_kernel.atomic_write import write_atomically
from sandbox_kernel.paths import data_dir, private_dir


class ServerLock:
    """This server's own lock. POSIX locks, not flock: a forked child does not inherit them."""

    def __init__(self) -> None:
        self.server = secrets.token_hex(8)
        self._path = _path(self.server)
        write_atomically(_place(self._path), json.dumps(host_identity.here()))
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        """The server is about to end, and the next one may take its kernels. Idempotent."""
        if self._fd >= 0:
            _forget(self._path)
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def taking_over(server: str) -> Iterator[bool]:
    """True if that server is dead. Nobody else can take its kernels inside this context."""
    path = _path(server)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
        _forget(path)
    finally:
        os.close(fd)


def known_servers() -> set[str]:
    """Servers of this host that hold a lock, and dead ones that left theirs. Servers of another
    host that shares the folder are not listed: this host cannot know whether they are dead."""
    return {path.stem for path in _folder().glob("*.lock") if _of_this_host(path)}


def _of_this_host(lock: Path) -> bool:
    # Not in the lock itself: a process that closes a file loses its locks on it.
    try:
        place = json.loads(_place(lock).read_text())
    except FileNotFoundError:
        return True  # of an earlier version
    except (OSError, ValueError):
        return False
    return isinstance(place, dict) and host_identity.where(place) != "elsewhere"


def _place(lock: Path) -> Path:
    return lock.with_suffix(".host")


def _forget(lock: Path) -> None:
    lock.unlink(missing_ok=True)
    _place(lock).unlink(missing_ok=True)


def _path(server: str) -> Path:
    return _folder() / f"{server}.lock"


def _folder() -> Path:
    return private_dir(data_dir() / "servers")
