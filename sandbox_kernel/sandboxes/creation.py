"""A sandbox that is being made: by whom, and is it whole?

A backend reserves a sandbox's name with a record before anything exists. Until the sandbox is
whole the record names the process that makes it, so that others wait for it, and clear away what a
process left that died over it. Called by the backends' ``create``, ``remove`` and ``sweep``.
"""

from __future__ import annotations

import asyncio
import os
import time

from sandbox_kernel.errors import SandboxNotFound
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.processes import ProcessId

_CREATOR = "creator"
_POLL = 0.05


def begin(record: Record) -> None:
    """Say in a record, which the caller then reserves, that this process makes the sandbox."""
    creator = ProcessId.of(os.getpid())
    record.data[_CREATOR] = [creator.pid, creator.start] if creator else None


def finish(record: Record) -> None:
    """Say in a record, which the caller then saves, that the sandbox is whole."""
    del record.data[_CREATOR]


def unfinished(record: Record) -> bool:
    """Whether the sandbox is not whole, and may never be."""
    return _CREATOR in record.data


def under_way(record: Record) -> bool:
    """Whether somebody is making the sandbox now."""
    creator = record.data.get(_CREATOR)
    return creator is not None and ProcessId(*creator).alive


def cut_short(record: Record) -> bool:
    """Whether the process that made the sandbox died over it."""
    return unfinished(record) and not under_way(record)


async def settled(records: Records, backend: str, name: str) -> Record | None:
    """The record of a sandbox that is to be removed; None if there is none.

    Waits while the sandbox is being made (as long as that may take), because its maker would not
    notice that it was removed.
    """
    deadline = None
    while True:
        try:
            record = records.load(backend, name)
        except SandboxNotFound:
            return None
        deadline = deadline or time.monotonic() + record.sandbox_spec().start_timeout
        if not under_way(record) or time.monotonic() > deadline:
            return record
        await asyncio.sleep(_POLL)
