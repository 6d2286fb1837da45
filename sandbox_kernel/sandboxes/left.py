"""Sandboxes whose kernel waits for a process that has gone: left by a server that was stopped, or
by a process that was killed. They end with their lease, unless somebody goes on with them.

Whoever uses a kernel says so in the sandbox's record. Used by the server's extension, which bounds
how many it leaves, and by the command, which tells of them and ends them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.processes import ProcessId

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


def is_left(record: Record) -> bool:
    """Whether a sandbox runs, with a kernel that no process uses. Only of this machine's; one whose
    files could not be saved is no such: it waits for the user."""
    if record.where != "here" or _HOST not in record.kernel or "unsaved" in record.kernel:
        return False
    if record.kernel[_HOST] == _AT_REST or user_of(record) is not None:
        return False
    return not has_ended(record)


def has_ended(record: Record) -> bool:
    """Whether it is known from here that no process of the sandbox runs any more."""
    first = record.data.get("init")
    if first is None or record.where == "elsewhere":
        return False
    return record.where == "before" or not ProcessId(*first).alive


def all_left(backends: Sequence[str]) -> list[Record]:
    """All of them, the oldest first."""
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
