"""Snapshots of microVMs with their memory: making, finding and removing them.

A record names a snapshot before the SDK makes it, so that one whose making failed or was cut short
is found and removed. Called by the client.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

import microsandbox as sdk

from sandbox_kernel.errors import (
    SandboxError,
    SandboxExists,
    SandboxGone,
    SandboxNotFound,
    SandboxTimeout,
)
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes import creation
from sandbox_kernel.sandboxes.base import SnapshotInfo
from sandbox_kernel.spec import check_name

_GROUP = "sandbox-kernel"
_TIMEOUT = 600.0
_log = logging.getLogger(__name__)


class Snapshots:
    """This user's snapshots. Their records hold the tokens of the agents in them."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    @property
    def _records(self) -> Records:
        return Records(private_dir(data_dir() / "snapshots"))

    async def make(self, source: Record, name: str) -> SnapshotInfo:
        """Keep a running sandbox, with its memory. On failure nothing is left."""
        check_name(name, "A snapshot name")
        await self.sweep()
        record = Record(self._backend, name, secrets.token_hex(6), source.spec)
        record.kernel = dict(source.kernel)
        record.data = {"sandbox": source.name, "snapshot": f"sk-{name}-{record.id}"}
        creation.begin(record)
        try:
            self._records.reserve(record)
        except SandboxExists:
            raise SandboxExists(
                f"A snapshot named {name!r} exists already in the backend {self._backend!r}."
            ) from None
        try:
            making = sdk.Snapshot.create(
                record.data["snapshot"], from_sandbox=source.data["vm"], group=_GROUP, full=True
            )
            made = await asyncio.wait_for(making, _TIMEOUT)
        except BaseException as error:
            await asyncio.shield(self._undo(record))
            raise _explained(error, source.name) from error
        record.data["reference"] = made.reference
        creation.finish(record)
        self._records.save(record)
        return _info(record)

    def load(self, name: str) -> Record:
        """The record of a whole snapshot. SandboxNotFound."""
        try:
            record = self._records.load(self._backend, name)
        except SandboxNotFound:
            record = None
        if record is None or creation.unfinished(record):
            raise SandboxNotFound(f"No snapshot named {name!r} in the backend {self._backend!r}.")
        return record

    def list(self) -> list[SnapshotInfo]:
        """Whole snapshots, oldest first."""
        records = self._records.list(self._backend)
        return [_info(record) for record in records if not creation.unfinished(record)]

    async def remove(self, name: str) -> None:
        """Delete one. Removing twice is no error."""
        record = await creation.settled(self._records, self._backend, name)
        if record is not None:
            await asyncio.shield(self._destroy(record))

    async def sweep(self) -> None:
        """Remove those whose making was cut short; never raises for a single one."""
        for record in self._records.list(self._backend):
            if creation.cut_short(record):
                await self._undo(record)

    async def _undo(self, record: Record) -> None:
        try:
            await self._destroy(record)
        except SandboxError as error:
            _log.warning("%s", error)  # its record stays, so the next sweep tries again

    async def _destroy(self, record: Record) -> None:
        try:
            reference = record.data.get("reference") or record.data["snapshot"]
            await asyncio.wait_for(sdk.Snapshot.remove(reference, force=True), _TIMEOUT)
        except (sdk.MicrosandboxError, asyncio.TimeoutError) as error:
            if "not found" not in str(error):
                raise SandboxError(
                    f"Snapshot {record.name!r} could not be removed: {error}. Try again later."
                ) from error
        self._records.delete(record.backend, record.name)


def _explained(error: BaseException, sandbox: str) -> BaseException:
    if isinstance(error, sdk.SandboxNotRunningError):
        return SandboxGone(f"Sandbox {sandbox!r} does not run, so its memory cannot be kept.")
    if isinstance(error, asyncio.TimeoutError):
        return SandboxTimeout(
            f"No snapshot of sandbox {sandbox!r} was made within {_TIMEOUT:g} s. Is the disk slow "
            f"or full?"
        )
    if isinstance(error, sdk.MicrosandboxError):
        return SandboxError(f"No snapshot of sandbox {sandbox!r} could be made: {error}")
    return error


def _info(record: Record) -> SnapshotInfo:
    return SnapshotInfo(
        record.name, record.backend, str(record.data["sandbox"]), record.created, memory=True
    )
