"""The file of an audit: JSON lines that are only appended to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sandbox_kernel.untrusted_text import printable

log = logging.getLogger(__name__)

Event = dict[str, Any]
Sink = Callable[[Event], object]

SUFFIX = ".jsonl"
MAX_BYTES = 8 * 1024 * 1024
KEPT = 4
"""Rotated files beside the present one."""
_MOST_TEXT = 1024
_MOST_LINE = 64 * 1024
_MOST_TOLD = 1000
_told: set[Path] = set()
"""Which cannot be written, as was logged. Most callers append to a file once, and forget it."""


def now() -> str:
    """The time of an event."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class AuditLog:
    """Appends events to a file (mode 0600), and renames it to ``.1`` when it is full. Never raises:
    a failure is logged once for each path. Several processes may append to one file."""

    def __init__(self, path: str | Path, *, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> None:
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._kept = kept

    def __call__(self, event: Mapping[str, Any]) -> None:
        try:
            self.append(line_of(event))
        except Exception as error:  # noqa: BLE001  an audit that fails must not end what it audits
            _tell_once(self.path, error)

    def check(self) -> None:
        """Find out whether events can be appended. OSError."""
        os.close(self._open())

    def append(self, line: bytes) -> None:
        """Append what ``line_of`` gave. OSError."""
        fd = self._open()
        try:
            # Another process may write to it, too: rotate what is there, not what we remember.
            if os.fstat(fd).st_size + len(line) > self._max_bytes and self._rotate(fd):
                os.close(fd)
                fd = self._open()
            data = line if _ends_with_a_line(fd) else b"\n" + line
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.path, flags, 0o600)

    def _rotate(self, fd: int) -> bool:
        """Whether the path is, or may be, another file now. If another process rotates at this
        very moment, this file gets one more line."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        ours, found = os.fstat(fd), os.lstat(self.path)
        if (ours.st_dev, ours.st_ino) != (found.st_dev, found.st_ino):
            return True  # another process has just done it
        if not ours.st_size:
            return False
        for number in range(self._kept, 0, -1):
            older = self.path if number == 1 else numbered(self.path, number - 1)
            with contextlib.suppress(FileNotFoundError):
                os.replace(older, numbered(self.path, number))
        return True


def _ends_with_a_line(fd: int) -> bool:
    """Not if the disk was full in the middle of one."""
    size = os.fstat(fd).st_size
    return not size or os.pread(fd, 1, size - 1) == b"\n"


def _tell_once(path: Path, error: Exception) -> None:
    if path not in _told and len(_told) < _MOST_TOLD:
        _told.add(path)
        log.warning("The audit cannot be written to %s: %s. Work goes on without it.", path, error)


def numbered(path: Path, number: int) -> Path:
    """Where a file is after so many rotations."""
    return path.with_name(f"{path.name}.{number}") if number else path


def line_of(event: Mapping[str, Any]) -> bytes:
    """An event as one line: ASCII, bounded, without control characters."""
    line = json.dumps({str(key): _bounded(value) for key, value in event.items()})
    if len(line) > _MOST_LINE:
        kept = {key: _bounded(event.get(key)) for key in ("time", "kind", "sandbox")}
        line = json.dumps({**kept, "cut": True})
    return line.encode("ascii") + b"\n"


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        text = printable(value).replace("\n", "\\n").replace("\t", "\\t")
        return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."
    if isinstance(value, Mapping):
        return {str(key)[:_MOST_TEXT]: _bounded(inner) for key, inner in list(value.items())[:64]}
    if isinstance(value, (list, tuple)):
        return [_bounded(inner) for inner in value[:64]]
    return value
