"""One sandbox: a microVM with its record."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import microsandbox as sdk

from sandbox_kernel.errors import (
    ExecFailed,
    SandboxError,
    SandboxGone,
    SandboxPaused,
    SandboxTimeout,
)
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.base import Command, SandboxInfo, SnapshotInfo
from sandbox_kernel.sandboxes.microsandbox import machine, scripts
from sandbox_kernel.sandboxes.microsandbox.stream import MicrosandboxStream
from sandbox_kernel.sandboxes.recording_client import RecordedHandle
from sandbox_kernel.untrusted_text import last_lines, printable

if TYPE_CHECKING:
    from sandbox_kernel.sandboxes.microsandbox.client import MicrosandboxClient

_CONNECT_TIMEOUT = 30.0
_GOODBYE_TIMEOUT = 20.0
_STOP_TIMEOUT = 20.0
_PAUSE_TIMEOUT = 60.0
_LOOK_UP_TIMEOUT = 30.0
_COPY_TIMEOUT = 600.0
_CONSOLE_LINES, _CONSOLE_SIZE = 5, 500

_log = logging.getLogger(__name__)


class MicrosandboxHandle(RecordedHandle):
    """One microVM, running, paused or ended."""

    backend = "microsandbox"
    python = "python3"
    holds_lease = True

    def __init__(self, record: Record, client: MicrosandboxClient) -> None:
        super().__init__(record)
        self._client = client
        self._vm: str = record.data["vm"]
        self._connection: sdk.Sandbox | None = None

    # --- commands

    async def open_command(self, command: Command) -> MicrosandboxStream:
        """As the surface says; there is no duplex socket. The command runs as the image's user."""
        command = command.with_defaults(self.spec.env, self.workdir)
        program, arguments = command.program, list(command.argv[1:])
        if command.tty is not None:
            program, arguments = "/bin/sh", scripts.with_terminal(command.argv, command.tty)
        try:
            connection = await self._connected()
            started = await connection.exec_stream(
                program,
                arguments,
                env=dict(command.env),
                cwd=command.cwd,
                stdin=sdk.Stdin.pipe(),
                tty=command.tty is not None,
            )
            event = await started.recv()
        except (sdk.MicrosandboxError, OSError, asyncio.TimeoutError) as error:
            raise await self._broken(error) from error
        except (TypeError, ValueError) as error:  # e.g. a NUL in an argument
            raise ExecFailed(
                f"{program!r} cannot be run in sandbox {self.name!r}: {error}"
            ) from error
        if event is None:
            raise await self._broken()
        if str(event.event_type) == "failed":
            why = bytes(event.data or b"").decode(errors="replace")[:500]
            raise ExecFailed(
                f"{command.program!r} could not be run in sandbox {self.name!r}: {why} (or its "
                f"working folder is not there)."
            )
        return MicrosandboxStream(started, int(event.pid or 0), self._exit_signal, self._broken)

    async def spawn_command(self, command: Command) -> None:
        """As the surface says. The output goes to the VM's console. Images without Python do not
        end with their ``main`` command, but when their lease is over."""
        argv = ["/bin/sh", *scripts.spawned(command.argv, main=command.main)]
        result = await self.run_command(replace(command, argv=argv), timeout=_CONNECT_TIMEOUT * 2)
        if not result.ok:
            raise ExecFailed(
                f"{command.program!r} could not be started in sandbox {self.name!r}: "
                f"{result.output.strip()[-500:] or 'there is no such command'}"
            )

    async def set_up(self) -> None:
        """What a VM needs each time it has booted. Shows, too, that commands run."""
        set_up = Command(["/bin/sh", *scripts.SET_UP], cwd="/")
        result = await self.run_command(set_up, timeout=_COPY_TIMEOUT)
        if not result.ok:
            raise ExecFailed(
                f"Sandbox {self.name!r} could not be set up: {result.output.strip()[-500:]}"
            )

    async def _connected(self) -> sdk.Sandbox:
        if self._connection is None:
            found = await sdk.Sandbox.get(self._vm)
            if str(found.status) == "paused":
                raise SandboxPaused(f"Sandbox {self.name!r} is paused; resume it first.")
            self._connection = await asyncio.wait_for(found.connect(), _CONNECT_TIMEOUT)
        return self._connection

    async def _exit_signal(self, pid: int) -> int | None:
        """The signal that ended a command. None if the sandbox cannot tell (any more)."""
        try:
            connection = await self._connected()
            asking = connection.exec("/bin/sh", scripts.LOOK_UP, cwd="/")
            found = await asyncio.wait_for(asking, _LOOK_UP_TIMEOUT)
        except (sdk.MicrosandboxError, SandboxError, OSError, asyncio.TimeoutError):
            return None
        return scripts.exit_signal(found.stdout_bytes, pid)

    async def _broken(self, error: BaseException | None = None) -> SandboxError:
        """What to tell who used a connection that broke or could not be made."""
        self._connection = None
        if await self._lives():
            return SandboxError(
                f"The connection to sandbox {self.name!r} broke: {error or 'it ended early'}"
            )
        return SandboxGone(await self._why_gone())

    async def _lives(self) -> bool:
        """Whether it is there and meant to be: the SDK may not know yet that it is ending."""
        if self._stored() is None or self._noted("ended"):
            return False
        if await machine.status(self._vm) not in ("running", "paused"):
            return False
        return bool(await asyncio.to_thread(machine.processes, self._vm))

    async def _why_gone(self) -> str:
        if self._stored() is None:
            return f"Sandbox {self.name!r} has ended: it was removed. Create a new one to go on."
        reason, console = self._noted("ended"), ""
        if not reason:
            reason = await asyncio.to_thread(machine.why_ended, self._vm)
            console = printable((await self.logs(tail=_CONSOLE_LINES))[-_CONSOLE_SIZE:]).strip()
        return (
            f"Sandbox {self.name!r} has ended: {reason}. Its log: `sandbox-kernel logs "
            f"{self.name}`. Restart its kernel to start it again with its files."
            + (f" Its console ends: {console}" if console else "")
        )

    # --- its life

    async def stop(self) -> None:
        status = await machine.status(self._vm)
        if status in ("stopped", "gone"):
            return
        if status == "running":
            try:  # the commands are asked to end, which the SDK itself does not
                goodbye = Command(["/bin/sh", *scripts.GOODBYE], cwd="/")
                await self.run_command(goodbye, timeout=_GOODBYE_TIMEOUT)
            except SandboxError as error:
                _log.debug("sandbox %s: %s", self.name, error)  # it is ended anyway
        self._note(ended="it was stopped")
        try:
            stopping = (await sdk.Sandbox.get(self._vm)).stop(timeout=_STOP_TIMEOUT)
            await asyncio.wait_for(stopping, _STOP_TIMEOUT + 5)
            await machine.ended(self._vm)
        except (sdk.MicrosandboxError, asyncio.TimeoutError):
            await machine.kill(self._vm)
        self._connection = None

    async def kill(self) -> None:
        if await machine.status(self._vm) in ("stopped", "gone"):
            return
        self._note(ended="it was killed")
        await machine.kill(self._vm)
        self._connection = None

    async def pause(self) -> None:
        status = await machine.status(self._vm)
        if status == "paused":
            return
        if status != "running":
            raise SandboxGone(await self._why_gone())
        await self._ask((await sdk.Sandbox.get(self._vm)).pause(), "paused", _PAUSE_TIMEOUT)

    async def resume(self) -> None:
        status = await machine.status(self._vm)
        if status == "gone":
            raise SandboxGone(await self._why_gone())
        if status == "paused":
            await self._ask((await sdk.Sandbox.get(self._vm)).resume(), "resumed", _PAUSE_TIMEOUT)
        elif status == "stopped":
            self._connection = None
            starting = machine.insist(lambda: sdk.Sandbox.start(self._vm, detached=True))
            await self._ask(starting, "started again", self.spec.start_timeout)
            self._note(ended=None)
            await self.set_up()

    async def _ask(self, asked: Any, what: str, timeout: float) -> None:
        try:
            await asyncio.wait_for(asked, timeout)
        except sdk.MicrosandboxError as error:
            raise SandboxError(f"Sandbox {self.name!r} could not be {what}: {error}") from error
        except asyncio.TimeoutError:
            raise SandboxTimeout(
                f"Sandbox {self.name!r} could not be {what} within {timeout:g} s."
            ) from None

    # --- copies

    async def snapshot(self, name: str) -> SnapshotInfo:
        """Keeps the memory, the running processes and the files of a running sandbox."""
        source = self._client.records.load(self.backend, self.name)
        return await self._client.snapshot_keeper.take_from(source, name)

    async def fork(self, name: str = "") -> MicrosandboxHandle:
        """As the surface says. The copy's files, memory and processes are its own from the moment
        of the fork on; ``SandboxedKernel.fork`` makes it known to its agent, too."""
        spec = replace(self.spec, name=name or f"sandbox-{secrets.token_hex(4)}")
        if await machine.status(self._vm) not in ("running", "paused"):
            raise SandboxGone(await self._why_gone())
        return await self._client.copy(
            spec, self._stored(), lambda vm: machine.fork(self._vm, vm, _COPY_TIMEOUT)
        )

    # --- what is known

    async def logs(self, *, tail: int | None = None) -> str:
        """What was written to the VM's console, by its kernel and by spawned commands."""
        return last_lines(await asyncio.to_thread(machine.console, self._vm), tail)

    async def info(self) -> SandboxInfo:
        status = await machine.status(self._vm)
        detail: dict[str, Any] = {"vm": self._vm}
        if status in ("running", "paused"):
            found = await asyncio.to_thread(machine.processes, self._vm)
            detail["pid"] = found[0].pid if found else None
        else:
            detail["reason"] = await self._why_gone()
        killed = await asyncio.to_thread(machine.oom_kills, self._vm)
        return self._info(
            status,
            oom_kills=len(killed),
            last_kill=f"out of memory: {killed[-1]!r} was killed" if killed else "",
            detail=detail,
        )
