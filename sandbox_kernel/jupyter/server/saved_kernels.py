"""What is on disk about servers and their kernels, so that the next server can go on with them.

All of it is in ``<data dir>/servers``, which only this user can read. Each kernel has two files:
``<name>.json`` says where the kernel is and how to talk to it (with the key that signs its
messages, which the host chose), ``<name>.seen`` marks the last message that a client received.

Each server holds a lock on its own file as long as its process lives. Kernels name their server. A
process that gets another server's lock knows that it is dead, and alone may take its kernels.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandbox_kernel import host_identity
from sandbox_kernel.atomic_write import write_atomically
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.paths import data_dir, private_dir

log = logging.getLogger("sandbox_kernel")

VERSION = 1
MARK_SIZE = 16
_SERVER = re.compile(r"[0-9a-f]{16}")


@dataclass
class SavedKernel:
    """One kernel of a server."""

    kernel_id: str
    kernel_name: str
    server: str
    """The server that it belongs to (``ServerLock``)."""
    root_dir: str
    """The folder that the server serves: paths of sessions are relative to it."""
    provisioner: dict[str, Any]
    """For ``SandboxProvisioner.load_provisioner_info``."""
    cwd: str | None = None
    sessions: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the session manager: session_id, path, name, type."""
    place: dict[str, str] = field(default_factory=host_identity.here)
    """The server's host: other hosts may share the folder."""
    version: int = VERSION

    @property
    def sandbox(self) -> str:
        return str(self.provisioner.get("sandbox"))

    @property
    def backend(self) -> str:
        return str(self.provisioner.get("backend"))

    def save(self) -> None:
        write_atomically(_path(self.kernel_id, "json"), json.dumps(asdict(self)))

    def forget(self) -> None:
        """The kernel is gone. Idempotent."""
        for ending in ("json", "seen"):
            _path(self.kernel_id, ending).unlink(missing_ok=True)


def saved_kernels() -> Iterator[SavedKernel]:
    """Kernels of all servers of this user. Logs files that it cannot read."""
    for path in sorted(_folder().glob("*.json")):
        try:
            values = json.loads(path.read_text())
            if values.get("version") != VERSION:
                raise ValueError(f"version {values.get('version')!r}, not {VERSION}")
            kept = SavedKernel(**values)
            if not _SERVER.fullmatch(kept.server):
                raise ValueError("a wrong server id")
        except FileNotFoundError:
            continue  # another server has deleted it since the listing
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read (%s). Delete it if it stays.", path, error)
            continue
        yield kept


class Seen:
    """The last message of a kernel that a client received. Each message is marked with one system
    call, so the mark is right even if the server is killed in the next moment."""

    def __init__(self, kernel_id: str) -> None:
        self._fd = os.open(_path(kernel_id, "seen"), os.O_RDWR | os.O_CREAT, 0o600)

    def mark(self, message_id: str) -> None:
        if self._fd >= 0:
            os.pwrite(self._fd, digest(message_id), 0)

    def last(self) -> bytes:
        """Digest of its id; empty if no client has received any."""
        found = os.pread(self._fd, MARK_SIZE, 0) if self._fd >= 0 else b""
        return found if len(found) == MARK_SIZE else b""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1


def digest(message_id: str) -> bytes:
    """Of fixed length: a message id comes from the sandbox and may be long."""
    return hashlib.sha256(message_id.encode(errors="replace")).digest()[:MARK_SIZE]


class ServerLock:
    """This server's own lock. POSIX locks, not flock: a forked child does not inherit them."""

    def __init__(self) -> None:
        self.server = secrets.token_hex(8)
        self._path = _lock_path(self.server)
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
    path = _lock_path(server)
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
    """Servers of this host that hold a lock, and dead ones that left theirs. Not those of other
    hosts that share the folder: this host cannot know whether they are dead."""
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


def _lock_path(server: str) -> Path:
    return _folder() / f"{server}.lock"


def _folder() -> Path:
    return private_dir(data_dir() / "servers")


def _path(kernel_id: str, ending: str) -> Path:
    if not kernel_id:
        raise SandboxError("A kernel without an id cannot be saved for the next server.")
    # A client may choose a kernel's id, so it is no file name.
    return _folder() / f"{hashlib.sha256(kernel_id.encode()).hexdigest()[:32]}.{ending}"
