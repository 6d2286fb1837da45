"""One box, for the process that runs the SDK; made by DirectClient."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox_kernel.errors import SandboxError, SandboxGone, SandboxNotFound, Unsupported
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.base import Command, SandboxInfo, SnapshotInfo
from sandbox_kernel.sandboxes.boxlite.backend import BoxHandle
from sandbox_kernel.sandboxes.controlled_stream import ControlledStream
from sandbox_kernel.sandboxes.untrusted_files import read_tail, remove_tree
from sandbox_kernel.untrusted_text import last_lines, printable

if TYPE_CHECKING:
    from sandbox_kernel.sandboxes.boxlite.sdk_client import DirectClient

_log = logging.getLogger(__name__)

_STOP_TIMEOUT = 30.0
_LIMITS = {
    "memory_mib": "MiB (the VM's memory)",
    "cpus": "(the VM's CPUs)",
    "disk_mib": "MiB (the VM's disk, with the image)",
}


class Notes:
    """Reason (``ended``) and ``log`` of a box that has ended, in files on the host, by the
    sandbox's id. Reading a missing one gives an empty text."""

    def __init__(self, sandbox_id: str) -> None:
        self._id = sandbox_id

    @property
    def _folder(self) -> Path:
        return private_dir(data_dir() / "boxes") / self._id

    def read(self, name: str) -> str:
        return read_tail(self._folder / name)

    def write(self, name: str, text: str) -> None:
        (private_dir(self._folder) / name).write_text(text, errors="replace")

    def clear(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def remove(self) -> None:
        remove_tree(self._folder)


class DirectHandle(BoxHandle):
    """One box, running or stopped."""

    def __init__(self, client: DirectClient, record: Record) -> None:
        super().__init__(record)
        self._client = client
        self._notes = Notes(record.id)

    async def open_command(self, command: Command) -> ControlledStream:
        link = await self._client.link(self._record)
        return await link.open(command)

    async def spawn_command(self, command: Command) -> None:
        """As the surface says. The end of a ``main`` command is the end of the box."""
        link = await self._client.link(self._record)
        await link.spawn(command)

    async def stop(self) -> None:
        try:
            link = await self._client.link(self._record)
            # Not left to the exit code, which a broker that did not start the box may not see.
            self._notes.write("ended", "it was stopped")
            answer = await link.request("stop", _STOP_TIMEOUT)
            self._notes.write("log", printable(str(answer.get("log", ""))))
        except (SandboxGone, SandboxNotFound):
            pass
        except SandboxError as error:
            _log.info("Sandbox %s does not stop when asked: %s", self.name, error)
        await self._client.ended(self._record)

    async def kill(self) -> None:
        state = await self._client.runtime.state(self._record.data["box"])
        if state is not None and state.running:
            self._notes.write("ended", "it was killed")
            await self._client.runtime.finish(state.id)
        await self._client.ended(self._record)

    async def resume(self) -> None:
        """Starts a box that has stopped. No error if it runs."""
        client, record = self._client, self._record
        state = await client.runtime.state(record.data["box"])
        if state is None:
            raise client.gone(record, state)
        if state.running:
            return
        await client.close_link(record)
        await client.settle(record, state)
        self._notes.clear("ended")
        await client.restart(record)

    async def snapshot(self, name: str) -> SnapshotInfo:
        """Keeps the files of a stopped box."""
        state = await self._client.runtime.state(self._record.data["box"])
        if state is None:
            raise self._client.gone(self._record, state)
        if state.running:
            raise Unsupported(
                f"Sandbox {self.name!r} runs, and BoxLite's snapshot of a running box is not of "
                f"one point in time: later writes show in it. Stop the sandbox first."
            )
        await self._client.settle(self._record, state)
        return await self._client.snapshot_keeper.take_from(self._record, name)

    async def logs(self, *, tail: int | None = None) -> str:
        try:
            link = await self._client.link(self._record)
            text = printable(str((await link.request("logs")).get("log", "")))
        except SandboxGone:
            text = self._notes.read("log") or await self._client.console(self._record)
        return last_lines(text, tail)

    async def info(self) -> SandboxInfo:
        runtime = self._client.runtime
        state = await runtime.state(self._record.data["box"])
        detail: dict[str, Any] = {}
        status = "gone"
        if state is not None:
            status = "running" if state.running else "stopped"
            pids = [p.pid for p in await asyncio.to_thread(runtime.processes, state.id)]
            detail = {"box": state.id, "pids": pids}
        if status != "running":
            detail["reason"] = self._client.reason(self._record, state)
        asked = {field: getattr(self.spec, field) for field in _LIMITS}
        limits = {f: f"{int(v)} {_LIMITS[f]}" for f, v in asked.items() if v is not None}
        return self._info(status, limits=limits, detail=detail)
