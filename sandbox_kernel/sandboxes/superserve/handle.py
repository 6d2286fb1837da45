"""One sandbox: the SDK's object for it, and its record, if this machine has made it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import superserve as sdk

from sandbox_kernel.errors import (
    ExecFailed,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxPaused,
    SandboxTimeout,
)
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes import wrapped_command
from sandbox_kernel.sandboxes.base import Command, SandboxInfo, SnapshotInfo
from sandbox_kernel.sandboxes.folder_archive import packed
from sandbox_kernel.sandboxes.hosted import HostedHandle, LeaseRenewal
from sandbox_kernel.sandboxes.polling import attempts
from sandbox_kernel.sandboxes.superserve import api, request
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
_TRANSFER_TIMEOUT = 600
_GOODBYE = 5.0


class SuperserveHandle(HostedHandle):
    """One sandbox, in whatever state."""

    backend = request.BACKEND

    def __init__(self, record: Record, client: SuperserveClient, remote: Any) -> None:
        super().__init__(record)
        self._client = client
        self._remote = remote
        self._lease = LeaseRenewal(self.name, self.spec.lease_seconds, self._renew_lease)

    # --- commands

    async def open_command(self, command: Command) -> SuperserveStream:
        """As the surface says; there is no duplex socket."""
        return await self._start(command)

    async def _start(self, command: Command, *, log: str | None = None) -> SuperserveStream:
        asked = wrapped_command.request(command.with_defaults(self.spec.env, self.workdir), log=log)
        socket = await self._dial()
        stream = SuperserveStream(socket, asked, self._tool, self.name, self._why_broken)
        await stream.started(f"{command.program!r} could not be run in sandbox {self.name!r}")
        stream.on_close = self._lease.attach()
        return stream

    async def spawn_command(self, command: Command) -> None:
        """As the surface says. The end of a ``main`` command does not end the sandbox."""
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
        """Wait until the sandbox runs, with a fresh token. Or SandboxPaused, SandboxGone."""
        async for status in self._statuses("used"):
            if status == "active":
                if await self._ask(api.fresh_token(self._remote), "reached"):
                    return
            elif status == "paused":
                self._refuse_if_ended()  # it may have been stopped meanwhile
                if not self._lease.ran_out or self._noted("paused"):
                    raise SandboxPaused(
                        f"Sandbox {self.name!r} is paused. `sandbox-kernel resume {self.name}` "
                        f"lets it go on."
                    )
                await self.resume()  # the end of our own lease paused it

    async def _statuses(self, wanted: str) -> AsyncIterator[str]:
        """The status, again and again. SandboxGone when there is no sandbox any more, and
        SandboxTimeout when the caller has waited for too long."""
        status = ""
        async for _ in attempts(_SETTLE_TIMEOUT):
            status = await self._status()
            if status in ("failed", "deleted"):
                raise SandboxGone(self._why_gone(status))
            yield status
        raise SandboxTimeout(
            f"Sandbox {self.name!r} could not be {wanted}: Superserve has said {status!r} for "
            f"{_SETTLE_TIMEOUT:g} s. Try again later."
        )

    async def _ask(self, asking: Awaitable[object], what: str) -> bool:
        """False if the sandbox is on its way to another state; then the caller looks again."""
        with self._translating(what):
            try:
                await asking
            except sdk.ConflictError:
                return False
        return True

    async def _status(self) -> str:
        """The status at the service; ``deleted`` also if the service does not know the sandbox."""
        try:
            with self._translating("asked for its state"):
                return str((await self._remote.get_info()).status.value)
        except SandboxNotFound:
            return "deleted"
        except SandboxError:
            if self._remote._closed:
                return "deleted"
            raise

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
        if self._stored() is None or self._noted("ended"):
            raise SandboxGone(self._why_gone("deleted"))

    def _why_gone(self, status: str) -> str:
        start = f"Sandbox {self.name!r} has ended: "
        if self._stored() is None:
            return f"{start}it was removed. Create a new one to go on."
        reason = self._noted("ended")
        if status == "failed":
            reason = "Superserve says that it failed"
        elif not reason:
            reason = "Superserve does not have it any more: it was killed from outside, or deleted "
            reason += "after it had been paused for long"
        return (
            f"{start}{reason}. Remove it with `sandbox-kernel rm {self.name}`, and create a new "
            f"one to go on."
        )

    def _translating(self, what: str) -> contextlib.AbstractContextManager[None]:
        return api.translating(f"Sandbox {self.name!r} could not be {what}")

    async def _renew_lease(self) -> None:
        record = self._stored() or self._record
        active = time.time() - float(record.data.get("active_since") or record.created)
        with self._translating("kept"):
            await self._remote.update(timeout_seconds=request.lease_seconds(self.spec, active))

    # --- files

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
            delete = Command(["rm", "-f", path], cwd="/")
            await self.run_command(delete, timeout=_TRANSFER_TIMEOUT)

    async def write_file(self, path: str, content: bytes) -> None:
        async with self._transfer(path, "written"):
            await self._remote.files.write(path, content, timeout=_TRANSFER_TIMEOUT)

    async def read_file(self, path: str, *, max_bytes: int = 2**31) -> bytes:
        """Read a file from anywhere in the sandbox, not only below the working folder.
        SandboxError if it is not there, or larger than ``max_bytes``."""
        async with self._transfer(path, "read"):
            return bytes(
                await self._remote.files.read(path, timeout=_TRANSFER_TIMEOUT, max_bytes=max_bytes)
            )

    @contextlib.asynccontextmanager
    async def _transfer(self, path: str, what: str) -> AsyncIterator[None]:
        self._refuse_if_ended()
        # The SDK would resume a paused sandbox unasked, which costs money: so look first.
        if not api.has_token(self._remote) or await self._status() != "active":
            await self._settle()
        problem = f"{path} could not be {what} in sandbox {self.name!r}"
        try:
            with api.translating(problem):
                async with asyncio.timeout(_TRANSFER_TIMEOUT):
                    yield
        except SandboxNotFound as error:
            raise ExecFailed(f"{problem}: there is no such file.") from error

    # --- its life

    async def pause(self) -> None:
        """Idempotent, also while a pause or a resume is under way."""
        self._refuse_if_ended()
        await self._freeze()

    async def _freeze(self) -> None:
        self._note(paused="requested")
        try:
            async for status in self._statuses("paused"):
                if status == "paused":
                    return
                if status == "active":
                    pausing = self._remote.pause(wait=True, timeout=_SETTLE_TIMEOUT)
                    await self._ask(pausing, "paused")
        except BaseException:
            self._note(paused=None)
            raise

    async def resume(self) -> None:
        """Polls until the sandbox is active. One that was stopped has no process any more."""
        if self._stored() is None:
            raise SandboxGone(self._why_gone("deleted"))
        was_paused = False
        async for status in self._statuses("resumed"):
            if status == "active":
                break
            if status == "paused":
                was_paused = True
                # The service counts this limit from the resume on.
                with contextlib.suppress(*api.ERRORS):
                    await self._remote.update(timeout_seconds=request.lease_seconds(self.spec))
                await self._ask(self._remote.resume(timeout=_SETTLE_TIMEOUT), "resumed")
        self._lease.restarted()
        changes = {"active_since": time.time()} if was_paused else {}
        stopped = self._noted("ended")
        self._note(paused=None, ended=None, **changes)
        if stopped:
            # What was begun in the last moment was frozen with the rest, and goes on now.
            try:
                await self._end_all(9)
            except BaseException:
                self._note(ended="it was stopped")
                raise

    async def stop(self) -> None:
        """Asks the commands to end, then pauses what is left: the files are kept."""
        if self._noted("ended") or await self._status() in ("failed", "deleted"):
            return
        log = ""
        try:
            await self._end_all(15)
            log = (await self.logs())[-_KEPT_LOG:]
        except SandboxPaused:
            pass
        except SandboxError as error:
            # Frozen they are harmless; `resume` ends them, or refuses.
            _log.warning("Sandbox %s: %s", self.name, error)
        # Noted first: who finds it paused must not take that for a pause.
        self._note(ended="it was stopped", log=log)
        try:
            await self._freeze()
        except BaseException:
            self._note(ended=None)
            raise

    async def _end_all(self, number: int) -> None:
        """Signal all commands, until none is left; after a while, kill them. SandboxError if they
        become no fewer: code in there may start new ones faster than they can be killed."""
        started = time.monotonic()
        while await self._tool(wrapped_command.line("signal", 0, "-", number)):
            waited = time.monotonic() - started
            if waited > 2 * _GOODBYE:
                raise SandboxError(
                    f"The commands in sandbox {self.name!r} do not end. Remove it with "
                    f"`sandbox-kernel rm {self.name}`."
                )
            number = 0 if waited < _GOODBYE else 9
            await asyncio.sleep(_POLL)

    async def kill(self) -> None:
        if self._noted("ended") and await self._status() == "deleted":
            return
        self._note(ended="it was killed")
        await self._client.delete_remote(self.id, self._record.data["base_url"])

    # --- copies

    async def snapshot(self, name: str) -> SnapshotInfo:
        """Keeps memory, processes and files. The service pauses the sandbox for a moment."""
        source = self._client.recorded(self.name) or self._record

        async def work(record: Record) -> None:
            record.id = await self.take_snapshot(name)
            record.data["base_url"] = api.endpoint()

        return await self._client.snapshot_keeper.take(name, source, work)

    async def fork(self, name: str = "") -> SuperserveHandle:
        """As the surface says, by way of a snapshot that is deleted at once."""
        spec = replace(self.spec, name=name or f"sandbox-{secrets.token_hex(4)}")
        snapshot = await self.take_snapshot(f"fork-{spec.name}")
        try:
            return await self._client.copy(spec, self._client.recorded(self.name), snapshot)
        finally:
            await asyncio.shield(api.delete_snapshot(snapshot))

    async def take_snapshot(self, name: str) -> str:
        """Make a snapshot at the service; its id there."""
        self._refuse_if_ended()
        if (status := await self._status()) in ("failed", "deleted"):
            raise SandboxGone(self._why_gone(status))
        with self._translating("kept as a snapshot"):
            return str((await self._remote.snapshot(name=name)).id)

    # --- what is known

    async def logs(self, *, tail: int | None = None) -> str:
        """What spawned commands have printed."""
        if self._noted("ended"):
            text = self._noted("log")
        else:
            script = f"tail -c {_LOG_TAIL} {LOG} 2>/dev/null || true"
            command = Command(["/bin/sh", "-c", script], cwd="/")
            text = (await self.run_command(command, timeout=60)).stdout
        return last_lines(text, tail)

    async def info(self) -> SandboxInfo:
        detail: dict[str, Any] = {"endpoint": self._record.data.get("base_url")}
        try:
            word = await self._status()
        except SandboxError as error:
            if not isinstance(error.__cause__, ValueError):
                raise
            word = "unknown"
            detail["reason"] = str(error)
        status = "gone" if self._stored() is None else _STATUS.get(word, "unknown")
        if self._noted("ended") and status != "gone":
            status = "stopped"
        if status in ("stopped", "gone"):
            detail["reason"] = self._why_gone(word)
        detail["superserve"] = word
        return self._info(status, limits=request.limits(self.spec), detail=detail)


_STATUS = {
    **dict.fromkeys(("starting", "active", "resuming", "migrating"), "running"),
    **dict.fromkeys(("pausing", "paused"), "paused"),
    "failed": "stopped",
    "deleted": "gone",
}
