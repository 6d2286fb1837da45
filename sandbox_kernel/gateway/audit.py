"""What happened, as JSON lines in a file that is only appended to.

Any callable that takes an event can be the sink of a gateway; AuditLog is the usual one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sandbox_kernel.untrusted_text import printable

log = logging.getLogger(__name__)

Event = dict[str, Any]
Sink = Callable[[Event], object]

MAX_BYTES = 8 * 1024 * 1024
KEPT = 4
"""Rotated files beside the present one."""
_MOST_TEXT = 1024
_MOST_LINE = 64 * 1024


def egress_event(
    action: str,
    *,
    sandbox: str | None = None,
    host: str | None = None,
    port: int | None = None,
    method: str | None = None,
    path: str | None = None,
    rule: int | None = None,
    reason: str = "",
    sent: int = 0,
    received: int = 0,
    seconds: float = 0.0,
    secrets: Sequence[str] = (),
) -> Event:
    """The event of one connection or request. ``path`` loses its query, which may hold secrets;
    ``secrets`` are the names of those that were put in."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "kind": "egress",
        "sandbox": sandbox,
        "action": action,
        "host": host,
        "port": port,
        "method": method,
        "path": None if path is None else path.partition("?")[0],
        "rule": rule,
        "reason": reason,
        "sent": sent,
        "received": received,
        "seconds": round(seconds, 3),
        **({"secrets": list(secrets)} if secrets else {}),
    }


def secret_event(action: str, name: str, *, sandbox: str | None = None, **facts: Any) -> Event:
    """What happened to a secret, by its name: ``exposed`` to the sandbox, or ``kept`` from a
    request that had its placeholder."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "kind": "secret",
        "sandbox": sandbox,
        "action": action,
        "secret": name,
        **facts,
    }


class AuditLog:
    """Appends events to a file (mode 0600), and renames it to ``.1`` when it is full. Never raises:
    the first failure is logged."""

    def __init__(self, path: str | Path, *, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> None:
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._kept = kept
        self._failed = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        try:
            self._append(line_of(event))
        except Exception as error:  # noqa: BLE001  an audit that fails must not end what it audits
            if not self._failed:
                self._failed = True
                log.warning("The audit cannot be written to %s: %s", self.path, error)

    def _append(self, line: bytes) -> None:
        fd = self._open()
        try:
            # Another process may write to it, too: rotate what is there, not what we remember.
            if os.fstat(fd).st_size + len(line) > self._max_bytes and self._rotate(fd):
                os.close(fd)
                fd = self._open()
            os.write(fd, line)
        finally:
            os.close(fd)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.path, flags, 0o600)

    def _rotate(self, fd: int) -> bool:
        ours, now = os.fstat(fd), os.lstat(self.path)
        if (ours.st_dev, ours.st_ino) != (now.st_dev, now.st_ino):
            return True  # another process has just done it
        if not ours.st_size:
            return False
        for number in range(self._kept, 0, -1):
            older = self.path if number == 1 else _numbered(self.path, number - 1)
            with contextlib.suppress(FileNotFoundError):
                os.replace(older, _numbered(self.path, number))
        return True


def line_of(event: Mapping[str, Any]) -> bytes:
    """An event as one line: ASCII, bounded, without control characters."""
    line = json.dumps({str(key): _bounded(value) for key, value in event.items()})
    if len(line) > _MOST_LINE:
        line = json.dumps({"time": event.get("time"), "kind": event.get("kind"), "cut": True})
    return line.encode("ascii") + b"\n"


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        text = printable(value).replace("\n", "\\n").replace("\t", "\\t")
        return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."
    if isinstance(value, Mapping):
        return {str(key): _bounded(inner) for key, inner in list(value.items())[:64]}
    if isinstance(value, (list, tuple)):
        return [_bounded(inner) for inner in value[:64]]
    return value


def read(
    path: str | Path, *, since: datetime | None = None, denied: bool = False
) -> Iterator[Event]:
    """The events of a log, oldest first, with those of its rotated files. Lines that are none, such
    as one that is being written, are left out."""
    path = Path(path)
    numbers = [n for n in range(1, 100) if _numbered(path, n).exists()]
    for file in (*(_numbered(path, n) for n in reversed(numbers)), path):
        with contextlib.suppress(FileNotFoundError), open(file, "rb") as lines:
            for line in lines:
                event = _event(line)
                if event is None or (denied and event.get("action") != "deny"):
                    continue
                if since is None or _is_since(event, since):
                    yield event


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _is_since(event: Event, since: datetime) -> bool:
    try:
        return datetime.fromisoformat(event["time"]) >= since
    except (KeyError, TypeError, ValueError):
        return False


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
