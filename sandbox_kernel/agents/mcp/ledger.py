"""Which sandboxes the MCP servers of this user have made, and with which policy.

One file for each, ``<data>/mcp/NAME.json``. It outlives the server: a later one, of the same
policy, may go on with the sandbox, and no server touches any other. All servers of a policy count
together, under a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sandbox_kernel.atomic_write import write_atomically
from sandbox_kernel.errors import SandboxNotFound, SpecError, SpecRefused
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.spec import check_name

STARTING = 600.0
"""Seconds in which a sandbox may be missing because it is being made."""


@dataclass(frozen=True)
class Entry:
    """A sandbox of an MCP server."""

    sandbox: str
    fingerprint: str
    created: float


class Ledger:
    """The files of one user. Its methods block; call them in a thread."""

    def __init__(self, existing: Callable[[], Collection[str]]) -> None:
        """``existing`` gives the names of the sandboxes that exist."""
        self._folder = private_dir(data_dir() / "mcp")
        self._existing = existing

    def add(self, sandbox: str, fingerprint: str, policy: Mapping[str, str], most: int) -> None:
        """Note a sandbox that will be made now. SpecRefused if the servers of this policy, given as
        its fingerprints, have ``most`` already."""
        with self._locked():
            count = sum(1 for entry in self._current() if entry.fingerprint in policy)
            if count >= most:
                raise SpecRefused(
                    f"There are {count} sandboxes already, and {most} are allowed. Close one with "
                    f"the tool close, or wait: one that nobody uses ends by itself."
                )
            entry = Entry(sandbox, fingerprint, time.time())
            write_atomically(self._path(sandbox), json.dumps(asdict(entry)), lasting=False)

    def find(self, sandbox: str, policy: Mapping[str, str]) -> Entry:
        """SandboxNotFound for a sandbox that no server has made, or one of another policy. Which of
        them is not said: a model learns nothing of other sandboxes."""
        unknown = SandboxNotFound(
            f"There is no sandbox {sandbox!r} here. It has ended, or this server did not make it. "
            f"Open a new one with the tool open."
        )
        try:
            entry = self._read(self._path(check_name(sandbox)))
        except SpecError:
            raise unknown from None
        if entry is None or entry.fingerprint not in policy:
            raise unknown
        return entry

    def forget(self, sandbox: str) -> None:
        """The sandbox has ended."""
        with contextlib.suppress(FileNotFoundError):
            self._path(sandbox).unlink()

    def rename(self, reserved: str, sandbox: str) -> None:
        """The sandbox that was noted as ``reserved`` has this name."""
        with self._locked():
            entry = self._read(self._path(reserved))
            if entry is not None:
                named = Entry(sandbox, entry.fingerprint, entry.created)
                write_atomically(self._path(sandbox), json.dumps(asdict(named)), lasting=False)
                self.forget(reserved)

    def _current(self) -> list[Entry]:
        """The entries of sandboxes that exist, or are being made. Deletes the others."""
        existing, found = self._existing(), []
        for path in self._folder.glob("[!.]*.json"):
            entry = self._read(path)
            age = time.time() - entry.created if entry else STARTING
            if entry and (entry.sandbox in existing or 0 <= age < STARTING):
                found.append(entry)
            else:
                path.unlink(missing_ok=True)
        return found

    def _read(self, path: Path) -> Entry | None:
        try:
            entry = Entry(**json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return entry if entry.sandbox == path.stem else None

    def _path(self, sandbox: str) -> Path:
        return self._folder / f"{sandbox}.json"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Of all servers of this user. It is held for a moment only, so waiting is short."""
        fd = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
