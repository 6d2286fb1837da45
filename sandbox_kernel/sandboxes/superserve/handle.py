"""One sandbox: the SDK's object for it, and its record, if this machine has made it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import superserve as sdk

from sandbox_kernel.errors import (
    SandboxError,
    SandboxGone,
    SandboxPaused,
    SandboxTimeout,
)
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes import wrapped_command
from sandbox_kernel.sandboxes.base import GUEST_PATH
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.folder_archive import packed
from sandbox_kernel.sandboxes.polling import attempts
from sandbox_kernel.sandboxes.recording_client import RecordedHandle
from sandbox_kernel.sandboxes.results import SandboxInfo, SnapshotInfo
from sandbox_kernel.sandboxes.superserve import api, request
from sandbox_kernel.sandboxes.superserve.api import TRANSFER_TIMEOUT
from sandbox_kernel.sandboxes.superserve.lease import Lease
from sandbox_kernel.sandboxes.superserve.stream import SuperserveStream, run_tool
from sandbox_kernel.untrusted_text import last_lines, printable

if TYPE_CHECKING:
    from sandbox_kernel.sandboxes.superserve.client import SuperserveClient

_log = logging.getLogger(__name__)

LOG = "/tmp/.sandbox-kernel.log"  # noqa: S108  (a path inside the sandbox)
_LOG_TAIL, _KEPT_LOG = 256 * 1024, 16 * 1024
_SETTLE_TIMEOUT = 120.0
_POLL = 0.05
_DIALS = 3
_LARGE = 2**20
"""From so many bytes on, an upload goes by the files API: one request, but one round trip more."""
_GOODBYE = 5.0
_DAY = 24 * 3600.0
_MOVING = ("starting", "resuming", "migrating", "pausing")


class SuperserveHandle(RecordedHandle):
    """One sandbox, in whatever state."""

    backend = request.BACKEND
    python = "python3"

    def __init__(self, record: Record, client: SuperserveClient, remote: Any) -> None:
        super().__init__(record)
        self._client = client
        self._remote = remote
        self._lease = Lease(record, remote, self._stored)

    @property
    def agent_lease(self) -> float:
        """The service pauses the sandbox at the end of its lease; the agent must not end first."""
        return self.spec.lease_seconds + _DAY

    # --- commands

    async def open_command(self, command: Command) -> SuperserveStream:
        """As the surface says; there is no duplex socket."""
        return await self._start(command)

    async def _start(self, command: Command, *, log: str | None = None) -> SuperserveStream:
        asked = wrapped_command.request(command.with_defaults(self.spec.env, self.workdir), log=log)
        stream = await SuperserveStream.open(
            await self._dial(),
            asked,
            command.program,
            self.name,
            marks=wrapped_command.Marks(),
            tool=self._tool,
            why_broken=self._why_broken,
            python=self.python or "python3",
        )
        self._lease.attach(stream)
        return stream

    async def spawn_command(self, command: Command) -> None:
        """As the surface says. The sandbox does not end with its ``main`` command: it is paused
        when its lease is over."""
        async with await self._start(command, log=LOG) as stream:
            await stream.wait()

    async def _tool(self, line: str) -> int:
        return await run_tool(await self._dial(), line)

    async def _dial(self) -> Any:
        """A websocket to the sandbox, which must run. Never resumes one that was paused."""
        self._refuse_if_ended()
        if not api.has_token(self._remote):
            await self._settle()
        last: BaseException | None = None
        for _ in range(_DIALS):
            try:
                return await api.dial(self._remote)
            except api.DIAL_ERRORS as error:
                last = error
                # A stale token, a sandbox that does not run, or the network.
                await self._settle()
        raise SandboxError(
            f"No command can be started in sandbox {self.name!r}: {printable(str(last))[:300]}"
        ) from last

    async def _settle(self) -> None:
        """Wait until the sandbox runs, with a fresh token. SandboxPaused and SandboxGone say why
        that will not be."""
        status = ""
        async for _ in attempts(_SETTLE_TIMEOUT):
            status = await self._status()
            if status == "active":
                try:
                    await api.fresh_token(self._remote)
                    return
                except sdk.ConflictError:
                    pass  # it is on its way to another state just now
                except api.ERRORS as error:
                    raise self._translated(error, "reached") from error
            elif status == "paused":
                self._refuse_if_ended()  # it may have been stopped meanwhile
                if not self._lease.ran_out():
                    raise SandboxPaused(
                        f"Sandbox {self.name!r} is paused. `sandbox-kernel resume {self.name}` "
                        f"lets it go on."
                    )
                await self.resume()
            elif status not in _MOVING:
                raise SandboxGone(self._why_gone(status))
        raise self._too_long(status, "used")

    async def _status(self) -> str:
        """The status at the service; ``deleted`` also if the service does not know the sandbox."""
        try:
            return str((await self._remote.get_info()).status.value)
        except sdk.NotFoundError:
            return "deleted"
        except api.ERRORS as error:
            if self._remote._closed:
                return "deleted"
            raise self._translated(error, "asked for its state") from error

    async def _why_broken(self, error: BaseException | None) -> SandboxError:
        """The error for a connection that broke."""
        try:
            self._refuse_if_ended()
            status = await self._status()
        except SandboxError as problem:
            return problem
        if status in ("failed", "deleted"):
            return SandboxGone(self._why_gone(status))
        if status in ("paused", "pausing"):
            return SandboxPaused(f"Sandbox {self.name!r} was paused, which cut the connection.")
        why = printable(str(error or "it ended early"))[:300]
        return SandboxError(f"The connection to sandbox {self.name!r} broke: {why}")

    def _refuse_if_ended(self) -> None:
        if self._record_is_kept and (self._stored() is None or self._ended):
            raise SandboxGone(self._why_gone("deleted"))

    @property
    def _record_is_kept(self) -> bool:
        return not self._record.data.get("foreign")

    @property
    def _ended(self) -> str:
        record = self._stored()
        return str(record.data.get("ended") or "") if record else ""

    def _why_gone(self, status: str) -> str:
        start = f"Sandbox {self.name!r} has ended: "
        if self._record_is_kept and self._stored() is None:
            return f"{start}it was removed. Create a new one to go on."
        reason = self._ended
        if status == "failed":
            reason = "Superserve says that it failed"
        elif not reason:
            reason = "Superserve does not have it any more: it was killed from outside, or deleted "
            reason += "after it had been paused for long"
        return (
            f"{start}{reason}. Remove it with `sandbox-kernel rm {self.name}`, and create a new "
            f"one to go on."
        )

    def _translated(self, error: BaseException, what: str) -> SandboxError:
        return api.translated(error, f"Sandbox {self.name!r} could not be {what}")

    # --- files

    async def install_guest(self, zipapp: bytes) -> None:
        await self.write_file(GUEST_PATH, zipapp)

    async def upload(self, folder: str, target: str) -> None:
        """As the surface says. A large folder goes by the files API, in one request."""
        archive = await asyncio.to_thread(packed, folder)
        if len(archive) < _LARGE:
            return await self._unpack(target, stdin=archive)
        path = f"{self.agent_folder}-{secrets.token_hex(8)}.tgz"
        await self.write_file(path, archive)
        try:
            await self._unpack(target, path=path)
        finally:
            await self.exec("rm", ["-f", path], cwd="/", timeout=TRANSFER_TIMEOUT)

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file anywhere in the sandbox; folders on the way are made."""
        await self._ready_for_files()
        await api.write_file(self._remote, path, content, self.name)

    async def read_file(self, path: str, *, max_bytes: int = 2**31) -> bytes:
        """Read a file from anywhere in the sandbox, not only below the working folder.
        SandboxError if it is not there, or larger than ``max_bytes``."""
        await self._ready_for_files()
        return await api.read_file(self._remote, path, max_bytes, self.name)

    async def _ready_for_files(self) -> None:
        self._refuse_if_ended()
        # The SDK would resume a paused sandbox unasked, which costs money: so look first.
        if not api.has_token(self._remote) or await self._status() != "active":
            await self._settle()

    # --- its life

    async def pause(self) -> None:
        """Idempotent, also while a pause or a resume is under way."""
        self._refuse_if_ended()
        await self._freeze()

    async def _freeze(self) -> None:
        self._note(paused="requested")
        status = ""
        try:
            async for _ in attempts(_SETTLE_TIMEOUT, most=_POLL):
                status = await self._status()
                if status == "paused":
                    return
                if status in ("failed", "deleted"):
                    raise SandboxGone(self._why_gone(status))
                if status == "active":
                    await self._ask_to_pause()
            raise self._too_long(status, "paused")
        except BaseException:
            self._note(paused=None)
            raise

    async def _ask_to_pause(self) -> None:
        try:
            await self._remote.pause(wait=True, timeout=_SETTLE_TIMEOUT)
        except sdk.ConflictError:
            pass  # its state has changed since; the caller looks again
        except api.ERRORS as error:
            raise self._translated(error, "paused") from error

    def _too_long(self, status: str, wanted: str) -> SandboxTimeout:
        return SandboxTimeout(
            f"Sandbox {self.name!r} could not be {wanted}: Superserve has said {status!r} for "
            f"{_SETTLE_TIMEOUT:g} s. Try again later."
        )

    async def resume(self) -> None:
        """Polls until the sandbox is active. One that was stopped has no process any more."""
        record = self._stored()
        if record is None and self._record_is_kept:
            raise SandboxGone(self._why_gone("deleted"))
        was_paused, status = False, ""
        async for _ in attempts(_SETTLE_TIMEOUT):
            status = await self._status()
            if status == "active":
                break
            if status == "paused":
                was_paused = True
                await self._ask_to_resume()
            elif status not in _MOVING:
                raise SandboxGone(self._why_gone(status))
        else:
            raise self._too_long(status, "resumed")
        self._lease.restarted()
        changes = {"active_since": time.time()} if was_paused else {}
        stopped = bool(self._ended)
        self._note(paused=None, ended=None, **changes)
        if stopped:
            # What was begun in the last moment was frozen with the rest, and goes on now.
            try:
                await self._end_all(9)
            except BaseException:
                self._note(ended="it was stopped")
                raise

    async def _ask_to_resume(self) -> None:
        try:
            # The service counts this limit from the resume on.
            with contextlib.suppress(*api.ERRORS):
                await self._remote.update(timeout_seconds=request.lease_seconds(self.spec))
            await self._remote.resume(timeout=_SETTLE_TIMEOUT)
        except sdk.ConflictError:
            pass  # somebody else resumes it; the caller looks again
        except api.ERRORS as error:
            raise self._translated(error, "resumed") from error

    async def stop(self) -> None:
        """Asks the commands to end, then pauses what is left: the files are kept."""
        if self._ended or await self._status() in ("failed", "deleted"):
            return
        log = ""
        try:
            log = await self._say_goodbye()
        except SandboxPaused:
            pass
        except SandboxError as error:
            # Frozen they are harmless; `resume` ends them, or refuses.
            _log.warning("%s", error)
        # Noted first: who finds it paused must not take that for a pause.
        self._note(ended="it was stopped", log=log)
        try:
            await self._freeze()
        except BaseException:
            self._note(ended=None)
            raise

    async def _say_goodbye(self) -> str:
        await self._end_all(15)
        return (await self.logs())[-_KEPT_LOG:]

    async def _end_all(self, number: int) -> None:
        """Signal all commands, until none is left; after a while, kill them. SandboxError if they
        become no fewer: code in there may start new ones faster than they can be killed."""
        everything = (0, "-")
        started = time.monotonic()
        while await self._tool(wrapped_command.signal_line("python3", everything, number)):
            waited = time.monotonic() - started
            if waited > 2 * _GOODBYE:
                raise SandboxError(
                    f"The commands in sandbox {self.name!r} do not end. Remove it with "
                    f"`sandbox-kernel rm {self.name}`."
                )
            number = 0 if waited < _GOODBYE else 9
            await asyncio.sleep(_POLL)

    async def kill(self) -> None:
        if self._ended and await self._status() == "deleted":
            return
        self._note(ended="it was killed")
        await self._client.delete_remote(self._remote, self.id)

    # --- copies

    async def snapshot(self, name: str) -> SnapshotInfo:
        """Keeps memory, processes and files. The service pauses the sandbox for a moment."""
        return await self._client.keep(self, name)

    async def fork(self, name: str = "") -> SuperserveHandle:
        """As the surface says, by way of a snapshot that is deleted at once."""
        spec = replace(self.spec, name=name or f"sandbox-{secrets.token_hex(4)}")
        return await self._client.fork(self, spec)

    async def take_snapshot(self, name: str) -> str:
        """Make a snapshot at the service; its id there. For the client."""
        self._refuse_if_ended()
        if await self._status() in ("failed", "deleted"):
            raise SandboxGone(self._why_gone(await self._status()))
        try:
            made = await self._remote.snapshot(name=name)
        except api.ERRORS as error:
            raise self._translated(error, "kept as a snapshot") from error
        return str(made.id)

    # --- what is known

    async def logs(self, *, tail: int | None = None) -> str:
        """What spawned commands have printed."""
        record = self._stored()
        if record is not None and record.data.get("ended"):
            text = str(record.data.get("log") or "")
        else:
            script = f"tail -c {_LOG_TAIL} {LOG} 2>/dev/null || true"
            text = (await self.exec("/bin/sh", ["-c", script], cwd="/", timeout=60)).stdout
        return last_lines(text, tail)

    async def info(self) -> SandboxInfo:
        detail: dict[str, Any] = {"endpoint": self._record.data.get("base_url")}
        ended = self._ended
        try:
            word = await self._status()
        except SandboxError as error:
            if not isinstance(error.__cause__, ValueError):
                raise
            word = "unknown"
            detail["reason"] = str(error)
        if self._record_is_kept and self._stored() is None:
            status = "gone"
        else:
            status = _STATUS.get(word, "unknown")
            if ended and status != "gone":
                status = "stopped"
        if status in ("stopped", "gone"):
            detail["reason"] = self._why_gone(word)
        detail["superserve"] = word
        return self._info(status, limits=request.limits(self.spec), detail=detail)


_STATUS = {
    "starting": "running",
    "active": "running",
    "resuming": "running",
    "migrating": "running",
    "pausing": "paused",
    "paused": "paused",
    "failed": "stopped",
    "deleted": "gone",
}
