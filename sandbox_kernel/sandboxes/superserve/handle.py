"""One sandbox: the SDK's object for it, and its record, if this machine has made it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import superserve as sdk

from sandbox_kernel.errors import (
    ExecFailed,
    SandboxError,
    SandboxGone,
    SandboxPaused,
    SandboxTimeout,
)
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes import supervised
from sandbox_kernel.sandboxes.base import (
    GUEST_PATH,
    UNPACK,
    SandboxHandle,
    SandboxInfo,
    SnapshotInfo,
    packed,
)
from sandbox_kernel.sandboxes.superserve import api, request
from sandbox_kernel.sandboxes.superserve.stream import SuperserveStream, run_tool
from sandbox_kernel.text import last_lines, printable

if TYPE_CHECKING:
    from sandbox_kernel.sandboxes.superserve.client import SuperserveClient

LOG = "/tmp/.sandbox-kernel.log"  # noqa: S108  (a path inside the sandbox)
_LOG_TAIL, _KEPT_LOG = 256 * 1024, 16 * 1024
_SETTLE_TIMEOUT = 120.0
_POLL_FIRST, _POLL_MOST = 0.05, 1.0
_DIALS = 3
_LARGE = 2**20
"""From so many bytes on, an upload goes by the files API: one request, but one round trip more."""
_TRANSFER_TIMEOUT = 600.0
_GOODBYE = 5.0
_KEEP_MOST = 300.0
_DAY = 24 * 3600.0
_MOVING = ("starting", "resuming", "migrating", "pausing")


class SuperserveHandle(SandboxHandle):
    """One sandbox, in whatever state."""

    backend = request.BACKEND
    python = "python3"

    def __init__(self, record: Record, client: SuperserveClient, remote: Any) -> None:
        self._record = record
        self._client = client
        self._remote = remote
        self._streams = 0
        self._keeping: asyncio.Task[None] | None = None
        self._renewed = time.monotonic()
        self.name = record.name
        self.id = record.id
        self.spec = record.sandbox_spec()

    @property
    def agent_lease(self) -> float:
        """The service pauses the sandbox at the end of its lease; the agent must not end first."""
        return self.spec.lease_seconds + _DAY

    # --- commands

    async def open_stream(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        tty: tuple[int, int] | None = None,
        duplex: bool = False,
    ) -> SuperserveStream:
        """As the surface says; there is no duplex socket."""
        return await self._start(argv, env, cwd, tty=tty)

    async def _start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: str | None,
        *,
        tty: tuple[int, int] | None = None,
        log: str | None = None,
    ) -> SuperserveStream:
        asked = supervised.request(
            argv,
            env={**self.spec.env, **(env or {})},
            cwd=cwd or self.workdir,
            tty=tty,
            log=log,
        )
        stream = await SuperserveStream.open(
            await self._dial(),
            asked,
            argv[0],
            self.name,
            marks=supervised.Marks(),
            tool=self._tool,
            why_broken=self._why_broken,
            python=self.python or "python3",
        )
        self._attached(stream)
        return stream

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        main: bool = False,
    ) -> None:
        """As the surface says. The sandbox does not end with its ``main`` command: it is paused
        when its lease is over."""
        async with await self._start(argv, env, cwd, log=LOG) as stream:
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
        deadline = time.monotonic() + _SETTLE_TIMEOUT
        delay = _POLL_FIRST
        while True:
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
                if not self._lease_ran_out():
                    raise SandboxPaused(
                        f"Sandbox {self.name!r} is paused. `sandbox-kernel resume {self.name}` "
                        f"lets it go on."
                    )
                await self.resume()
            elif status not in _MOVING:
                raise SandboxGone(self._why_gone(status))
            if time.monotonic() > deadline:
                raise SandboxTimeout(
                    f"Sandbox {self.name!r} has been {status!r} for {_SETTLE_TIMEOUT:g} s. Try "
                    f"again later; nothing was changed."
                )
            await asyncio.sleep(delay)
            delay = min(_POLL_MOST, 2 * delay)

    async def _status(self) -> str:
        """The service's word; ``deleted`` also if it does not know the sandbox any more."""
        try:
            return str((await self._remote.get_info()).status.value)
        except sdk.NotFoundError:
            return "deleted"
        except api.ERRORS as error:
            if self._remote._closed:
                return "deleted"
            raise self._translated(error, "asked for its state") from error

    async def _why_broken(self, error: BaseException | None) -> SandboxError:
        """What to tell who used a connection that broke."""
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
            return f"{start}it was removed. Create it anew to go on."
        reason = self._ended
        if status == "failed":
            reason = "Superserve says that it failed"
        elif not reason:
            reason = "Superserve does not have it any more: it was killed from outside, or deleted "
            reason += "after it had been paused for long"
        return (
            f"{start}{reason}. Remove it with `sandbox-kernel rm {self.name}`, and create it anew "
            f"to go on."
        )

    def _translated(self, error: BaseException, what: str) -> SandboxError:
        return api.translated(error, f"Sandbox {self.name!r} could not be {what}")

    # --- its lease

    def _attached(self, stream: SuperserveStream) -> None:
        """Somebody is attached: the service's limit is pushed on as long as that is so."""
        self._streams += 1

        def detached() -> None:
            self._streams -= 1
            if not self._streams and self._keeping is not None:
                self._keeping.cancel()
                self._keeping = None

        stream.on_close = detached
        if self._keeping is None:
            self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        limit = self.spec.lease_seconds + request.SLACK
        while True:
            active = time.time() - self._active_since
            try:
                await self._remote.update(timeout_seconds=request.lease_seconds(self.spec, active))
                self._renewed = time.monotonic()
                pause = limit / 3
            except api.ERRORS as error:
                self._client.log.debug("the lease of sandbox %s: %s", self.name, error)
                pause = min(limit / 10, 10.0)
            await asyncio.sleep(min(pause, _KEEP_MOST))

    @property
    def _active_since(self) -> float:
        record = self._stored() or self._record
        found = record.data.get("active_since")
        return float(found) if isinstance(found, (int, float)) else record.created

    def _lease_ran_out(self) -> bool:
        """Whether it was the end of our own lease that paused it: we were attached, and could not
        say so in time (this machine slept, or the network did)."""
        record = self._stored()
        if record is None or record.data.get("paused") or not self._streams:
            return False
        return time.monotonic() - self._renewed > self.spec.lease_seconds

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
            await self.exec("rm", ["-f", path], cwd="/", timeout=_TRANSFER_TIMEOUT)

    async def _unpack(self, target: str, *, stdin: bytes = b"", path: str = "-") -> None:
        arguments = ["-I", "-c", UNPACK, target, path]
        result = await self.exec(
            self.python or "python3", arguments, stdin=stdin, cwd="/", timeout=_TRANSFER_TIMEOUT
        )
        if not result.ok:
            raise ExecFailed(
                f"Files could not be put to {target} in sandbox {self.name!r}: "
                f"{result.output.strip()[-500:]}"
            )

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file anywhere in the sandbox; folders on the way are made."""
        await self._files("written", path, lambda files: files.write(path, content, timeout=_LONG))

    async def read_file(self, path: str, *, max_bytes: int = 2**31) -> bytes:
        """Read a file from anywhere in the sandbox, not only below the working folder.
        SandboxError if it is not there, or larger than ``max_bytes``."""
        found: bytes = await self._files(
            "read", path, lambda files: files.read(path, timeout=_LONG, max_bytes=max_bytes)
        )
        return found

    async def _files(self, what: str, path: str, use: Any) -> Any:
        self._refuse_if_ended()
        # The SDK would resume a paused sandbox by itself, which costs money: so look first.
        if not api.has_token(self._remote) or await self._status() != "active":
            await self._settle()
        try:
            return await asyncio.wait_for(use(self._remote.files), _TRANSFER_TIMEOUT)
        except (*api.ERRORS, asyncio.TimeoutError) as error:
            problem = f"{path} could not be {what} in sandbox {self.name!r}"
            if isinstance(error, sdk.NotFoundError):
                raise ExecFailed(f"{problem}: there is no such file.") from error
            raise api.translated(error, problem) from error

    # --- its life

    async def pause(self) -> None:
        """Idempotent, also while a pause or a resume is under way."""
        self._refuse_if_ended()
        await self._freeze()

    async def _freeze(self) -> None:
        self._note(paused="requested")
        deadline = time.monotonic() + _SETTLE_TIMEOUT
        try:
            while (status := await self._status()) != "paused":
                if status in ("failed", "deleted"):
                    raise SandboxGone(self._why_gone(status))
                if time.monotonic() > deadline:
                    raise self._too_long(status, "paused")
                if status == "active":
                    await self._ask_to_pause()
                else:
                    await asyncio.sleep(_POLL_FIRST)
        except BaseException:
            self._note(paused=None)
            raise

    async def _ask_to_pause(self) -> None:
        try:
            await self._remote.pause(wait=True, timeout=_SETTLE_TIMEOUT)
        except sdk.ConflictError:
            await asyncio.sleep(_POLL_FIRST)  # its state has changed since; the caller looks again
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
        deadline = time.monotonic() + _SETTLE_TIMEOUT
        delay = _POLL_FIRST
        was_paused = False
        while (status := await self._status()) != "active":
            if time.monotonic() > deadline:
                raise self._too_long(status, "resumed")
            if status == "paused":
                was_paused = True
                await self._ask_to_resume()
                continue
            if status not in _MOVING:
                raise SandboxGone(self._why_gone(status))
            await asyncio.sleep(delay)
            delay = min(_POLL_MOST, 2 * delay)
        self._renewed = time.monotonic()
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
            # What the service counts from the resume on is the lease anew.
            with contextlib.suppress(*api.ERRORS):
                await self._remote.update(timeout_seconds=request.lease_seconds(self.spec))
            await self._remote.resume(timeout=_SETTLE_TIMEOUT)
        except sdk.ConflictError:
            await asyncio.sleep(_POLL_FIRST)  # somebody else does it
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
            self._client.log.warning("%s", error)
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
        while await self._tool(supervised.signal_line("python3", everything, number)):
            waited = time.monotonic() - started
            if waited > 2 * _GOODBYE:
                raise SandboxError(
                    f"The commands in sandbox {self.name!r} do not end. Remove it with "
                    f"`sandbox-kernel rm {self.name}`."
                )
            number = 0 if waited < _GOODBYE else 9
            await asyncio.sleep(_POLL_FIRST)

    async def kill(self) -> None:
        if self._ended and await self._status() == "deleted":
            return
        self._note(ended="it was killed")
        await self._client.delete_remote(self._remote, self.id)

    def _stored(self) -> Record | None:
        """This sandbox's record as it is now; None if it was removed."""
        return Records().current(self._record)

    def _note(self, **facts: Any) -> None:
        Records().note(self._record, **facts)

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
        return SandboxInfo(
            name=self.name,
            id=self.id,
            backend=self.backend,
            status=status,
            created=self._record.created,
            limits=request.limits(self.spec),
            detail={**detail, "superserve": word},
        )


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
_LONG = math.floor(_TRANSFER_TIMEOUT)
