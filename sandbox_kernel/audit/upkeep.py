"""Old audits go: thousands of sandboxes, over months, would fill a disk.

What goes first is what was written to least recently: audits older than ``MOST_DAYS``, then as many
as are needed to keep the folder below ``MOST_BYTES`` and ``MOST_AUDITS``. One sandbox has at most
five files of 8 MiB.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_kernel.audit.event_log import SUFFIX

MOST_DAYS = 90
MOST_BYTES = 512 * 1024 * 1024
MOST_AUDITS = 5000
_STAMP = ".looked-after"
_INTERVAL = 3600.0


def look_after(folder: Path) -> None:
    """Delete old audits, at most once an hour. For callers that need not hurry. Never raises but
    OSError."""
    stamp = folder / _STAMP
    with contextlib.suppress(FileNotFoundError):
        if abs(time.time() - stamp.lstat().st_mtime) < _INTERVAL:
            return
    if folder.is_dir():
        os.close(os.open(stamp, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.utime(stamp)
        delete_old(folder)


@dataclass
class _Audit:
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    last: float = 0.0


def delete_old(
    folder: Path,
    *,
    most_days: float = MOST_DAYS,
    most_bytes: int = MOST_BYTES,
    most_audits: int = MOST_AUDITS,
) -> None:
    """Delete the audits of a folder that are beyond these limits."""
    found: dict[str, _Audit] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            name, suffix, _ = entry.name.partition(SUFFIX)
            if suffix and entry.is_file(follow_symlinks=False):
                audit, status = found.setdefault(name, _Audit()), entry.stat(follow_symlinks=False)
                audit.files.append(entry.path)
                audit.bytes += status.st_size
                audit.last = max(audit.last, status.st_mtime)
    oldest, total, count = time.time() - most_days * 86400, 0, 0
    for audit in sorted(found.values(), key=lambda audit: audit.last, reverse=True):
        total, count = total + audit.bytes, count + 1
        if audit.last < oldest or total > most_bytes or count > most_audits:
            for file in audit.files:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file)
