"""LocalHandle: one jail, for whoever has its record."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from sandbox_kernel import host_identity
from sandbox_kernel.errors import ExecFailed, SandboxError, SandboxGone, SandboxTimeout
from sandbox_kernel.gateway.tls import extra
from sandbox_kernel.guest.commands.process_one import STOP_GRACE
from sandbox_kernel.host_processes import reap
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes import creation_marker
from sandbox_kernel.sandboxes.async_fd import AsyncFd, stream_ends
from sandbox_kernel.sandboxes.base import Command, SandboxInfo, Usage
from sandbox_kernel.sandboxes.channel import Channel, Hangup
from sandbox_kernel.sandboxes.controlled_stream import (
    START_TIMEOUT,
    ControlledStream,
    check_started,
)
from sandbox_kernel.sandboxes.local import jail_start, jail_state, trusted_bundle
from sandbox_kernel.sandboxes.local.cgroup import Cgroup
from sandbox_kernel.sandboxes.local.jail_folders import JailFolders
from sandbox_kernel.sandboxes.local.jail_request import open_request
from sandbox_kernel.sandboxes.local.limits import MIB
from sandbox_kernel.sandboxes.recording_client import RecordedHandle
from sandbox_kernel.sandboxes.untrusted_files import read_tail
from sandbox_kernel.untrusted_text import last_lines

_log = logging.getLogger(__name__)

_INFO_TIMEOUT = 5.0


class LocalStream(ControlledStream):
    """A command in a jail."""

    async def resize(self, rows: int, columns: int) -> None:
        if self._terminal and not self._closed:
            assert isinstance(self._stdout, AsyncFd)
            self._stdout.resize(rows, columns)


class LocalHandle(RecordedHandle):
    """One jail, running or ended."""

    backend = "local"
    agent_folder = jail_start.AGENT_FOLDER
    workdir = jail_start.WORKSPACE
    holds_lease = True
    takes_connections = True

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self._folders = JailFolders.from_json(record.data["folders"])
        limits = record.data.get("limits", {})
        coarse = [name for name in ("memory_mib", "processes") if "watch" in limits.get(name, "")]
        if coarse:
            self.weaknesses = (
                f"no cgroup can be made here, so a watch enforces {' and '.join(coarse)}, and sees "
                f"an excess after the fact; `sandbox-kernel doctor` says how to get one.",
            )

    # --- commands

    async def open_command(self, command: Command) -> LocalStream:
        """The command gets the far ends of pipes (or of a socket, or a terminal) that the host
        made, so its bytes take no way through another process, and a full pipe pushes back on its
        own."""
        terminal = command.tty is not None
        message = {"kind": "exec", **jail_start.command_fields(command)}
        if command.tty is not None:
            message["tty"] = list(command.tty)
        with stream_ends(duplex=command.duplex, terminal=terminal) as (theirs, ours):
            # A socket is both stdin and stdout.
            given = theirs * 2 if len(theirs) == 1 else theirs
            request, answer = await self._open(message, START_TIMEOUT, given)
            try:
                check_started(answer, command, self.name)
                if terminal:
                    ours.append(self._take_terminal(request))
                ports = [AsyncFd(end) for end in ours]
            except BaseException:
                request.close()
                raise
            sock = next((end for end in ours if isinstance(end, socket.socket)), None)
            ours.clear()
        return LocalStream(request, self._gone, ports, terminal=terminal, sock=sock)

    def _take_terminal(self, request: Channel) -> int:
        if len(request.fds) != 1 or not os.isatty(request.fds[0]):
            raise ExecFailed(f"Sandbox {self.name!r} did not give its terminal to the host.")
        return request.fds.pop()

    async def spawn_command(self, command: Command) -> None:
        """As the surface says. The end of a ``main`` command is the end of the jail."""
        message = {"kind": "spawn", **jail_start.command_fields(command), "main": command.main}
        check_started(await self._ask(message, START_TIMEOUT), command, self.name)

    def guest_argv(self, *arguments: str) -> Sequence[str]:
        base = self._record.data["python"]["base"]
        return [*jail_start.guest_command(base, "__main__"), *arguments]

    def kernel_argv(self, argv: Sequence[str]) -> Sequence[str]:
        python = self._record.data["python"]
        if argv and _same_interpreter(argv[0], python["host"]):
            return [python["overlay"], *argv[1:]]
        return argv

    async def install_guest(self, zipapp: bytes) -> None:
        """Nothing to do: the jail sees the guest program where it is installed."""

    async def trust(self, certificate: bytes) -> None:
        """As the surface says; by the system's bundle and Python's, too."""
        if not self._folders.trust.is_dir():
            raise SandboxError(
                f"Sandbox {self.name!r} was made without certificates of its own, so encrypted "
                f"requests cannot be read for it: the extra 'gateway' ({extra.INSTALL}) was not "
                f"there. Make a new sandbox."
            )
        await asyncio.to_thread(trusted_bundle.add, self._folders.trust, certificate)

    # --- its life

    async def stop(self) -> None:
        try:
            await self._ask({"kind": "stop"}, STOP_GRACE)
        except SandboxGone:
            return
        except SandboxTimeout:
            await self.kill()
            return
        init = jail_state.process(self._record, "init")
        if init and not await asyncio.to_thread(init.wait, STOP_GRACE + _INFO_TIMEOUT):
            await self.kill()
        reap()

    async def kill(self) -> None:
        creation_marker.check_here(self._record)
        init = jail_state.process(self._record, "init")
        if init is None or not init.alive:
            return
        try:
            self._folders.ended.write_text("it was killed")
        except OSError as error:  # its disk is full, or another process has removed it
            _log.debug("sandbox %s: cannot note why it ended: %s", self.name, error)
        await asyncio.to_thread(jail_state.kill, self._record)

    async def set_lease(self, seconds: float) -> bool:
        return "lease" in await self._ask({"kind": "lease", "seconds": seconds}, _INFO_TIMEOUT)

    async def clear(self) -> bool:
        return bool((await self._ask({"kind": "clear"}, _INFO_TIMEOUT)).get("cleared"))

    # --- its state

    async def logs(self, *, tail: int | None = None) -> str:
        return last_lines(await asyncio.to_thread(read_tail, self._folders.log), tail)

    async def usage(self) -> Usage | None:
        init = jail_state.process(self._record, "init")
        if init is None or not init.alive:
            return None
        return await asyncio.to_thread(jail_state.measure, init.pid, self._cgroup)

    async def info(self) -> SandboxInfo:
        own_disk = bool(self._record.data.get("own_disk"))
        detail: dict[str, Any] = {"workspace": str(self._folders.workspace)}
        if self._record.where == "elsewhere":
            detail["place"] = host_identity.in_words(self._record.place)
            return self._info("running", detail=detail)  # as far as this host can know
        if own_disk:
            detail["image"] = {
                "image": str(self._folders.image),
                "mount": str(self._folders.disk),
                "folder": str(self._folders.workspace),
            }
        init = jail_state.process(self._record, "init")
        status = "running"
        state: dict[str, Any] = {}
        try:
            state = await self._ask({"kind": "info"}, _INFO_TIMEOUT)
            detail["pid"] = init.pid if init else None
            if own_disk and init:
                detail["workspace"] = f"/proc/{init.pid}/root{jail_start.WORKSPACE}"
            detail["processes"] = jail_state.number(state.get("processes"))
            detail["memory_mib"] = jail_state.number(state.get("memory")) // MIB
            detail["attached"] = jail_state.number(state.get("attached"))
        except SandboxTimeout as error:
            detail["problem"] = str(error)
        except SandboxGone:
            if init is not None:
                # It hangs up a moment before the last of its processes has ended.
                await asyncio.to_thread(init.wait, _INFO_TIMEOUT)
            state = jail_state.saved_state(self._folders)
            status = "stopped" if self._folders.base.exists() else "gone"
            if own_disk:
                detail["workspace"] = f"{self._folders.image} (a file system, in /workspace)"
            detail["reason"] = jail_state.why_ended(self._record)
        cgroup = self._cgroup
        oom_kills = cgroup.oom_kills() if cgroup else 0
        if cgroup is not None and (peak := cgroup.peak_memory()):
            detail["peak_memory_mib"] = peak // MIB
        memory_limit = self._record.data.get("limits", {}).get("memory_mib", "?")
        return self._info(
            status,
            oom_kills=oom_kills + jail_state.memory_kills(state),
            last_kill=jail_state.last_kill(state, oom_kills, memory_limit),
            killed=jail_state.killed(state),
            detail=detail,
        )

    @property
    def _cgroup(self) -> Cgroup | None:
        return Cgroup.from_json(self._record.data.get("cgroup"))

    async def _ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        request, answer = await self._open(message, timeout)
        request.close()
        return answer

    async def _open(
        self, message: dict[str, Any], timeout: float, fds: Sequence[int] = ()
    ) -> tuple[Channel, dict[str, Any]]:
        creation_marker.check_here(self._record)
        try:
            return await open_request(self._folders.runtime, message, fds, timeout=timeout)
        except Hangup:
            raise self._gone() from None

    def _gone(self) -> SandboxGone:
        return SandboxGone(
            f"Sandbox {self.name!r} has ended: {jail_state.why_ended(self._record)}. Its log: "
            f"`sandbox-kernel logs {self.name}`. Create a new one to go on."
        )


def _same_interpreter(path: str, host: str) -> bool:
    """Whether a path names the same interpreter of the same environment: a virtual environment
    is known by the folder that the interpreter is called from."""
    return (
        os.path.isabs(path)
        and os.path.realpath(path) == os.path.realpath(host)
        and os.path.realpath(os.path.dirname(path)) == os.path.realpath(os.path.dirname(host))
    )
