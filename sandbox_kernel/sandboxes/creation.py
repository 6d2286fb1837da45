"""A sandbox that is being made: by whom, and is it whole?

A backend reserves a sandbox's name with a record before anything exists. Until the sandbox is
whole the record names the process that makes it, so that others wait for it, and clear away what a
process left that died over it. Called by the backends' ``create``, ``remove`` and ``sweep``.
"""

from __future__ import annotations

import asyncio
import os
import time

from sandbox_kernel import places
from sandbox_kernel.errors import SandboxElsewhere, SandboxNotFound
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.processes import ProcessId

_CREATOR = "creator"
_POLL = 0.05
_UNSEEN = 3600.0
"""Seconds in which any sandbox is made, or never."""


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
    """Whether somebody is making the sandbox now. On another host, where no process of this one
    can look, that is believed for as long as it may take."""
    creator = record.data.get(_CREATOR)
    if record.where == "elsewhere":
        return unfinished(record) and time.time() - record.created < _UNSEEN
    return creator is not None and record.where == "here" and ProcessId(*creator).alive


def check_here(record: Record) -> None:
    """SandboxElsewhere if the sandbox is another host's or container's. For backends whose
    sandboxes run on the host itself: what their records name means nothing here."""
    if record.where == "elsewhere":
        place = places.in_words(record.place)
        raise SandboxElsewhere(
            f"Sandbox {record.name!r} belongs to {place}, which shares this folder of records, and "
            f"can only be used and removed there. If that place is gone for good, delete "
            f"{record.folder}/{record.name}.json."
        )


def cut_short(record: Record) -> bool:
    """Whether the process that made the sandbox died over it."""
    return unfinished(record) and not under_way(record)


async def settled(
    records: Records, backend: str, name: str, *, hosted: bool = False
) -> Record | None:
    """The record of a sandbox that is to be removed; None if there is none. SandboxElsewhere if
    that is not for this host to do; ``hosted`` sandboxes can be reached from everywhere.

    Waits while the sandbox is being made (as long as that may take), because its maker would not
    notice that it was removed.
    """
    deadline = None
    while True:
        try:
            record = records.load(backend, name)
        except SandboxNotFound:
            return None
        if not hosted:
            check_here(record)
        deadline = deadline or time.monotonic() + record.sandbox_spec().start_timeout
        if not under_way(record) or time.monotonic() > deadline:
            return record
        await asyncio.sleep(_POLL)
