"""Snapshots of microVMs with their memory."""

from __future__ import annotations

import asyncio

import microsandbox as sdk

from sandbox_kernel.errors import SandboxError, SandboxGone, SandboxTimeout
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.recording_client import SnapshotKeeper
from sandbox_kernel.sandboxes.results import SnapshotInfo

_GROUP = "sandbox-kernel"
_TIMEOUT = 600.0


class Snapshots(SnapshotKeeper):
    """This user's snapshots. The SDK's name of one follows from its record."""

    timeout = _TIMEOUT
    sdk_errors = (sdk.MicrosandboxError, TimeoutError)

    async def take_from(self, source: Record, name: str) -> SnapshotInfo:
        """Keep a running sandbox, with its memory."""

        async def work(record: Record) -> None:
            made = await sdk.Snapshot.create(
                _sdk_name(record), from_sandbox=source.data["vm"], group=_GROUP, full=True
            )
            record.data["reference"] = made.reference

        return await self.take(name, source, work)

    async def explained(self, error: BaseException, record: Record) -> BaseException:
        sandbox = record.data["sandbox"]
        if isinstance(error, sdk.SandboxNotRunningError):
            return SandboxGone(f"Sandbox {sandbox!r} does not run, so its memory cannot be kept.")
        if isinstance(error, TimeoutError):
            return SandboxTimeout(
                f"No snapshot of sandbox {sandbox!r} was made within {_TIMEOUT:g} s. Is the disk "
                f"slow or full?"
            )
        if isinstance(error, sdk.MicrosandboxError):
            return SandboxError(f"No snapshot of sandbox {sandbox!r} could be made: {error}")
        return error

    async def destroy(self, record: Record) -> None:
        reference = record.data.get("reference") or _sdk_name(record)
        try:
            async with asyncio.timeout(_TIMEOUT):
                await sdk.Snapshot.remove(reference, force=True)
        except sdk.MicrosandboxError as error:
            if "not found" not in str(error):
                raise


def _sdk_name(record: Record) -> str:
    return f"sk-{record.name}-{record.id}"
