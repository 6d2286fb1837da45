"""Who uses a store now, so that ``gc`` deletes no pack that a save relies on.

A save claims the store before it looks at the packs, and releases the claim when it is published or
has failed. ``gc`` marks a pack as doomed before it looks at the claims:

* a save that began later sees the mark, and does not rely on the pack;
* a save that began earlier is seen by ``gc``, which leaves the pack for its next run.

A claim ends with its process, if that runs on this machine, or after a day.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from sandbox_kernel import host_identity
from sandbox_kernel.errors import StoreError
from sandbox_kernel.host_processes import ProcessId
from sandbox_kernel.workspace.blobs import Blobs
from sandbox_kernel.workspace.reports import parsed

FOLDER = "claims"
SKEW = 600.0
"""Seconds by which the clocks of two machines may differ."""
_LONGEST = 24 * 3600.0
_log = logging.getLogger("sandbox_kernel")


@dataclass(frozen=True)
class StoreClaim:
    """One use of a store."""

    kind: str
    """``save`` or ``gc``."""
    since: float
    machine: str = ""
    pid: int = 0
    start: int = 0

    def alive(self) -> bool:
        if time.time() - self.since > _LONGEST:
            return False
        return self.machine != _machine() or ProcessId(self.pid, self.start).alive


@contextmanager
def claimed(blobs: Blobs, kind: str) -> Iterator[str]:
    """Hold a claim, and yield its name."""
    process = ProcessId.of(os.getpid())
    claim = StoreClaim(kind, time.time(), _machine(), os.getpid(), process.start if process else 0)
    name = f"{kind}-{secrets.token_hex(8)}"
    path = f"{FOLDER}/{name}.json"
    blobs.put(path, json.dumps(asdict(claim)).encode(), lasting=False)
    try:
        yield name
    finally:
        try:
            blobs.delete(path, tidy=False)
        except (StoreError, OSError) as error:
            _log.warning(
                "The claim on the store %s was not deleted, and expires in a day: %s",
                blobs.url,
                error,
            )


def claims(blobs: Blobs, *, but: str = "") -> list[StoreClaim]:
    """All claims of others. Deletes those of dead processes."""
    found = []
    for file in blobs.names(FOLDER):
        name = file.removesuffix(".json")
        if name == but:
            continue
        try:
            claim = parsed(StoreClaim, json.loads(blobs.get(f"{FOLDER}/{file}")))
        except FileNotFoundError:
            continue  # released just now
        except (ValueError, TypeError, AttributeError):
            claim = StoreClaim(name.partition("-")[0], time.time())  # unreadable: assume a new one
        if claim.alive():
            found.append(claim)
        else:
            blobs.delete(f"{FOLDER}/{file}", tidy=False)
    return found


def _machine() -> str:
    """This machine, its boot and its pid namespace."""
    here = host_identity.here()
    return f"{here['host']} {here['boot']} {here['pids']}"
