"""Who uses a store just now, so that ``gc`` deletes nothing that a save relies on.

A save claims the store before it looks what is there, and gives the claim back when it is published
or has failed. ``gc`` notes a pack as doomed before it looks who claims the store:

* a save that began later sees that a pack is doomed, and does not rely on it;
* a save that began earlier is seen by ``gc``, which then leaves the pack for its next run.

A claim ends with its process, as far as that can be told, and after a day.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from sandbox_kernel.errors import StoreError
from sandbox_kernel.sandboxes.processes import ProcessId
from sandbox_kernel.workspace.blobs import FsspecBlobs, LocalBlobs

if TYPE_CHECKING:
    from sandbox_kernel.workspace.store import Store

P = ParamSpec("P")
T = TypeVar("T")
FOLDER = "claims"
SKEW = 600.0
"""Seconds by which the clocks of two machines may differ."""
_LONGEST = 24 * 3600.0
_log = logging.getLogger("sandbox_kernel")


@dataclass(frozen=True)
class Claim:
    """One use of a store."""

    kind: str
    """``save`` or ``gc``."""
    since: float
    machine: str = ""
    pid: int = 0
    start: int = 0

    def alive(self, now: float) -> bool:
        if now - self.since > _LONGEST:
            return False
        ours = self.machine == _machine()
        return not ours or ProcessId(self.pid, self.start).alive


_FIELDS = {f.name for f in fields(Claim)}


@contextmanager
def claimed(blobs: LocalBlobs | FsspecBlobs, kind: str) -> Iterator[str]:
    """Hold a claim; its name."""
    process = ProcessId.of(os.getpid())
    claim = Claim(kind, time.time(), _machine(), os.getpid(), process.start if process else 0)
    name = f"{kind}-{secrets.token_hex(8)}"
    path = f"{FOLDER}/{name}.json"
    blobs.put(path, json.dumps(asdict(claim)).encode(), lasting=False)
    try:
        yield name
    finally:
        try:
            blobs.delete(path, tidy=False)
        except (StoreError, OSError) as error:
            _log.warning("A claim on the store %s stays for a day: %s", blobs.url, error)


def claims(
    blobs: LocalBlobs | FsspecBlobs, *, but: str = "", now: Callable[[], float] = time.time
) -> list[Claim]:
    """All that are held by others; what dead processes have left is deleted."""
    found = []
    for file in blobs.names(FOLDER):
        name = file.removesuffix(".json")
        if name == but:
            continue
        try:
            values = json.loads(blobs.get(f"{FOLDER}/{file}"))
            claim = Claim(**{key: value for key, value in values.items() if key in _FIELDS})
        except FileNotFoundError:
            continue  # given back just now
        except (ValueError, TypeError, AttributeError):
            claim = Claim(name.partition("-")[0], now())  # cannot be read: taken for a young one
        if claim.alive(now()):
            found.append(claim)
        else:
            blobs.delete(f"{FOLDER}/{file}", tidy=False)
    return found


def claiming(
    function: Callable[Concatenate[Store, P], T],
) -> Callable[Concatenate[Store, P], T]:
    """For a function that makes a save or a baseline: it runs within ``Store.saving``."""

    @wraps(function)
    def within(store: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with store.saving():
            return function(store, *args, **kwargs)

    return within


@cache
def _machine() -> str:
    """This machine, since it was started, and its table of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = space = ""
    return f"{socket.gethostname()} {boot} {space}"
