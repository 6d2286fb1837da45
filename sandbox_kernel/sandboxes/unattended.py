"""Sandboxes whose kernel no process uses: a server was stopped, or a process was killed.

They end with their lease, unless another process takes them over. The process that uses a kernel is
in the sandbox's record. The server's extension bounds how many it leaves; the command lists and
ends them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sandbox_kernel.host_processes import ProcessId
from sandbox_kernel.records import Record, Records

SPARE = "spare"
"""In a record's ``kernel``: the sandbox was made ahead, for a kernel to come."""
_HOST, _AT_REST = "host", "at rest"


def in_use() -> dict[str, Any]:
    """For a record's ``kernel``: this process uses it."""
    found = ProcessId.of(os.getpid())
    return {_HOST: [found.pid, found.start] if found else None}


def released(*, waits: bool) -> dict[str, Any]:
    """For a record's ``kernel``: no process uses it; it ``waits`` for one, or is simply at rest."""
    return {_HOST: None if waits else _AT_REST}


def user_of(record: Record) -> int | None:
    """The process, of this machine, that uses the kernel; None if there is none."""
    host = record.kernel.get(_HOST)
    if record.where != "here" or not isinstance(host, list):
        return None
    process = ProcessId(*host)
    return process.pid if process.alive else None


def is_spare(record: Record) -> bool:
    """Whether a sandbox waits for its first kernel."""
    return bool(record.kernel.get(SPARE)) and "running" not in record.kernel


def is_left(record: Record) -> bool:
    """Whether a sandbox of this machine runs with a kernel that no process uses. One with unsaved
    files does not count: it waits for the user. Nor does a spare: it ends in a moment."""
    if record.where != "here" or _HOST not in record.kernel or "unsaved" in record.kernel:
        return False
    if is_spare(record):
        return False
    if record.kernel[_HOST] == _AT_REST or user_of(record) is not None:
        return False
    return not has_ended(record)


def has_ended(record: Record) -> bool:
    """Whether this host knows that no process of the sandbox runs."""
    first = record.data.get("init")
    if first is None or record.where == "elsewhere":
        return False
    return record.where == "before" or not ProcessId(*first).alive


def all_left(backends: Sequence[str]) -> list[Record]:
    """All sandboxes that are left, the oldest first."""
    records = Records()
    found = [r for backend in backends for r in records.list(backend) if is_left(r)]
    return sorted(found, key=lambda record: record.created)


def in_words(count: int) -> str:
    """For people, and what to do about it."""
    are = "1 sandbox waits" if count == 1 else f"{count} sandboxes wait"
    return (
        f"{are} for a server that was stopped, or a process that was killed. The next server for "
        f"the same folder goes on with its own; `sandbox-kernel rm --left` ends them all."
    )
