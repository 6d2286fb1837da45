"""What is on disk about a server's kernels, so that the next server can go on with them.

Each kernel has two files in ``<data dir>/servers``, which only this user can read: ``<name>.json``
says where the kernel is and how to talk to it (with the key that signs its messages; it comes from
the host, not from the sandbox), ``<name>.seen`` marks the last message that a client received.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
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
    """The server that it belongs to (``server_lock``)."""
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


def _folder() -> Path:
    return private_dir(data_dir() / "servers")


def _path(kernel_id: str, ending: str) -> Path:
    if not kernel_id:
        raise SandboxError("A kernel without an id cannot be saved for the next server.")
    # A client may choose a kernel's id, so it is no file name.
    return _folder() / f"{hashlib.sha256(kernel_id.encode()).hexdigest()[:32]}.{ending}"
