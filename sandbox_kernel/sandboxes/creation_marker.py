"""Whether a recorded sandbox is whole, and if not, which process is making it.

A backend reserves a sandbox's name with a record before anything exists. Until the sandbox is
whole, the record names its creator: other processes wait for it, and delete what a creator that
died left behind. Called by ``recording_client.RecordKeeper``.
"""

from __future__ import annotations

import os
import time

from sandbox_kernel import host_identity
from sandbox_kernel.errors import SandboxElsewhere
from sandbox_kernel.host_processes import ProcessId
from sandbox_kernel.records import Record

_CREATOR = "creator"
_UNSEEN = 3600.0
"""Seconds after which a creation on another host counts as dead."""


def begin(record: Record) -> None:
    """Name this process as the creator, in a record that the caller then reserves."""
    creator = ProcessId.of(os.getpid())
    record.data[_CREATOR] = [creator.pid, creator.start] if creator else None


def finish(record: Record) -> None:
    """Mark the sandbox as whole, in a record that the caller then saves."""
    del record.data[_CREATOR]


def unfinished(record: Record) -> bool:
    """Whether the sandbox is not whole, and may never be."""
    return _CREATOR in record.data


def under_way(record: Record) -> bool:
    """Whether a process is making the sandbox now. A creator on another host, which this one
    cannot see, counts as alive for an hour."""
    creator = record.data.get(_CREATOR)
    if record.where == "elsewhere":
        return unfinished(record) and time.time() - record.created < _UNSEEN
    return creator is not None and record.where == "here" and ProcessId(*creator).alive


def check_here(record: Record) -> None:
    """SandboxElsewhere if the sandbox belongs to another host or container. For backends whose
    sandboxes run on the host itself: their process ids and paths mean nothing here."""
    if record.where == "elsewhere":
        place = host_identity.in_words(record.place)
        raise SandboxElsewhere(
            f"Sandbox {record.name!r} belongs to {place}, which shares this folder of records, and "
            f"can only be used and removed there. If that place is gone for good, delete "
            f"{record.folder}/{record.name}.json."
        )
