"""A SandboxClient whose sandboxes are a broker's.

Has no state but where the broker is: each request has a connection of its own, and a broker that
has ended meanwhile is started anew. The bytes of streams go through pipes or a socket that the
broker holds the other ends of.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from sandbox_kernel.errors import SandboxGone, SandboxNotFound
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.base import (
    Diagnosis,
    ExecStream,
    SandboxClient,
    SandboxHandle,
    SandboxInfo,
    SnapshotInfo,
)
from sandbox_kernel.sandboxes.broker.ends import stream_ends
from sandbox_kernel.sandboxes.broker.launch import Place
from sandbox_kernel.sandboxes.broker.protocol import Channel, Hangup, raise_error
from sandbox_kernel.sandboxes.port import Port
from sandbox_kernel.spec import SandboxSpec

_CLOSE_TIMEOUT = 20.0


async def ask(place: Place, kind: str, **values: Any) -> Any:
    """One request, to its result."""
    channel, answer = await place.request({"kind": kind, **values})
    channel.close()
    raise_error(answer)
    return answer.get("result")


class BrokeredStream(ExecStream):
    """A command that the broker watches for us."""

    def __init__(
        self, channel: Channel, sandbox: str, ends: Sequence[int | socket.socket], terminal: bool
    ) -> None:
        ports = [Port(end) for end in ends]
        self._channel = channel
        self._sandbox = sandbox
        self._stdin = ports[0]
        self._stdout = ports[1] if len(ports) == 3 else ports[0]
        self._stderr = ports[2] if len(ports) == 3 else None
        self._ports = ports
        self._closed = False
        self._last: dict[str, Any] | None = None
        self._ended = False
        self._waiting = asyncio.Lock()
        if not terminal and isinstance(ends[0], socket.socket):
            self.socket = ends[0]

    async def read(self) -> bytes:
        return await self._stdout.read()

    async def read_stderr(self) -> bytes:
        return await self._stderr.read() if self._stderr else b""

    async def write(self, data: bytes) -> None:
        await self._stdin.write(data)

    async def close_stdin(self) -> None:
        self._stdin.end_input()

    async def wait(self) -> int:
        await self._wait_for_end()
        if self._last is None:
            raise SandboxGone(
                f"The broker of sandbox {self._sandbox!r} ended, and with it this command."
            )
        raise_error(self._last)
        code = self._last.get("exit")
        return code if isinstance(code, int) else -1

    async def _wait_for_end(self) -> None:
        async with self._waiting:
            while self._last is None and not self._ended:
                try:
                    message = await self._channel.receive()
                except Hangup:
                    self._ended = True
                    return
                if "exit" in message or "error" in message:
                    self._last = message

    async def send_signal(self, signum: int) -> None:
        await self._tell({"signal": int(signum)})

    async def resize(self, rows: int, columns: int) -> None:
        await self._tell({"resize": [rows, columns]})

    async def _tell(self, message: dict[str, Any]) -> None:
        if self._last is None and not self._closed:
            with contextlib.suppress(Hangup):
                await self._channel.send(message)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._channel.hang_up()
        for port in self._ports:
            port.close()
        try:
            # The broker hangs up when the command has ended.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wait_for_hangup(), _CLOSE_TIMEOUT)
        finally:
            self._ended = True
            self._channel.close()

    async def _wait_for_hangup(self) -> None:
        with contextlib.suppress(Hangup):
            while not self._ended:
                async with self._waiting:
                    message = await self._channel.receive()
                    if "exit" in message or "error" in message:
                        self._last = message


class BrokeredHandle(SandboxHandle):
    """One sandbox of a broker's. Backends subclass it for what is theirs."""

    def __init__(self, place: Place, record: Record) -> None:
        self.name = record.name
        self.id = record.id
        self.spec = record.sandbox_spec()
        self._place = place
        self._created = record.created

    async def open_stream(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        tty: tuple[int, int] | None = None,
        duplex: bool = False,
    ) -> BrokeredStream:
        message = {
            "kind": "open_stream",
            **self._named(),
            "argv": list(argv),
            "env": dict(env or {}),
            "cwd": cwd,
            "tty": list(tty) if tty else None,
        }
        with stream_ends(duplex=duplex or tty is not None) as (theirs, ours):
            channel, answer = await self._place.request(message, tuple(theirs))
            try:
                self._check(answer)
                stream = BrokeredStream(channel, self.name, list(ours), tty is not None)
            except BaseException:
                channel.close()
                raise
            ours.clear()
        return stream

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        main: bool = False,
    ) -> None:
        await self._ask("spawn", argv=list(argv), env=dict(env or {}), cwd=cwd, main=main)

    async def stop(self) -> None:
        with contextlib.suppress(SandboxGone):
            await self._ask("stop")

    async def kill(self) -> None:
        with contextlib.suppress(SandboxGone):
            await self._ask("kill")

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def snapshot(self, name: str) -> SnapshotInfo:
        return SnapshotInfo(**await self._ask("snapshot", snapshot=name))

    async def logs(self, *, tail: int | None = None) -> str:
        return str(await self._ask("logs", tail=tail))

    async def info(self) -> SandboxInfo:
        try:
            return SandboxInfo(**await self._ask("info"))
        except SandboxGone:
            return SandboxInfo(self.name, self.id, self.backend, "gone", self._created)

    def _named(self) -> dict[str, Any]:
        return {"name": self.name, "id": self.id}

    async def _ask(self, kind: str, **values: Any) -> Any:
        channel, answer = await self._place.request({"kind": kind, **self._named(), **values})
        channel.close()
        self._check(answer)
        return answer.get("result")

    def _check(self, answer: dict[str, Any]) -> None:
        try:
            raise_error(answer)
        except SandboxNotFound:
            raise SandboxGone(f"Sandbox {self.name!r} has ended: it was removed.") from None


class BrokeredClient(SandboxClient):
    """A backend behind a broker. Subclasses say where it is and what their handles are."""

    def place(self) -> Place:
        """Where the broker is; asked for each request, because the environment decides."""
        raise NotImplementedError

    def handle(self, record: Record) -> SandboxHandle:
        """A handle for a record."""
        return BrokeredHandle(self.place(), record)

    async def _handle(self, kind: str, **values: Any) -> SandboxHandle:
        found = await ask(self.place(), kind, **values)
        return self.handle(Records().load(self.backend, found["name"]))

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        self.capabilities.check(spec, self.backend)
        return await self._handle("create", spec=spec.to_dict())

    async def restore(self, snapshot: str, spec: SandboxSpec) -> SandboxHandle:
        return await self._handle("restore", snapshot=snapshot, spec=spec.to_dict())

    async def get(self, name: str) -> SandboxHandle:
        return self.handle(Records().load(self.backend, name))

    async def list(self) -> list[str]:
        return [record.name for record in Records().list(self.backend)]

    async def remove(self, name: str) -> None:
        with contextlib.suppress(SandboxNotFound):
            Records().load(self.backend, name)
            await asyncio.shield(ask(self.place(), "remove", name=name))

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        return [SnapshotInfo(**found) for found in await ask(self.place(), "snapshots")]

    async def remove_snapshot(self, name: str) -> None:
        await ask(self.place(), "remove_snapshot", name=name)

    async def diagnose(self) -> Sequence[Diagnosis]:
        return [Diagnosis(**found) for found in await ask(self.place(), "diagnose")]
