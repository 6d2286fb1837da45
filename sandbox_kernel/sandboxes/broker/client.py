"""A SandboxClient whose sandboxes are a broker's.

Has no state but where the broker is: each request has a connection of its own, and a broker that
has ended is started again. The bytes of streams go through pipes or a socket that the
broker holds the other ends of.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from sandbox_kernel.errors import SandboxError, SandboxGone, SandboxNotFound
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.async_fd import AsyncFd, stream_ends
from sandbox_kernel.sandboxes.base import (
    Command,
    Diagnosis,
    SandboxClient,
    SandboxHandle,
    SandboxInfo,
    SnapshotInfo,
)
from sandbox_kernel.sandboxes.broker.protocol import raise_error
from sandbox_kernel.sandboxes.broker.startup import Place
from sandbox_kernel.sandboxes.channel import Channel
from sandbox_kernel.sandboxes.controlled_stream import ControlledStream
from sandbox_kernel.sandboxes.recording_client import RecordedHandle
from sandbox_kernel.spec import SandboxSpec


async def ask(place: Place, kind: str, **values: Any) -> Any:
    """One request, to its result."""
    channel, answer = await place.request({"kind": kind, **values})
    channel.close()
    raise_error(answer)
    return answer.get("result")


class BrokeredStream(ControlledStream):
    """A command that the broker watches for us."""

    def __init__(
        self, channel: Channel, sandbox: str, ends: Sequence[int | socket.socket], terminal: bool
    ) -> None:
        gone = f"The broker of sandbox {sandbox!r} ended, and with it this command."
        sock = ends[0] if isinstance(ends[0], socket.socket) and not terminal else None
        ports = [AsyncFd(end) for end in ends]
        super().__init__(channel, lambda: SandboxGone(gone), ports, terminal=terminal, sock=sock)

    def _take(self, message: dict[str, Any]) -> None:
        super()._take(message)
        try:
            raise_error(message)
        except SandboxError as error:
            self._failure, self._ended = error, True


class BrokeredHandle(RecordedHandle):
    """One sandbox of a broker's. Backends subclass it for what is theirs."""

    def __init__(self, place: Place, record: Record) -> None:
        super().__init__(record)
        self._place = place

    async def open_command(self, command: Command) -> BrokeredStream:
        terminal = command.tty is not None
        message = {"kind": "open_stream", **self._named(), **command.to_json()}
        with stream_ends(duplex=command.duplex or terminal) as (theirs, ours):
            channel, answer = await self._place.request(message, tuple(theirs))
            try:
                with self._not_found_is_gone():
                    raise_error(answer)
                stream = BrokeredStream(channel, self.name, list(ours), terminal)
            except BaseException:
                channel.close()
                raise
            ours.clear()
        return stream

    async def spawn_command(self, command: Command) -> None:
        await self._ask("spawn", **command.to_json())

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
            return self._info("gone")

    def _named(self) -> dict[str, Any]:
        return {"name": self.name, "id": self.id}

    async def _ask(self, kind: str, **values: Any) -> Any:
        with self._not_found_is_gone():
            return await ask(self._place, kind, **self._named(), **values)

    @contextlib.contextmanager
    def _not_found_is_gone(self) -> Iterator[None]:
        try:
            yield
        except SandboxNotFound:
            raise SandboxGone(f"Sandbox {self.name!r} has ended: it was removed.") from None


class BrokeredClient(SandboxClient):
    """A backend behind a broker. Subclasses say where it is and what their handles are."""

    @abstractmethod
    def place(self) -> Place:
        """Where the broker is; asked for each request, because the environment decides."""

    @abstractmethod
    def handle(self, record: Record) -> SandboxHandle:
        """A handle for a record."""

    async def ask(self, kind: str, **values: Any) -> Any:
        """One request, to its result."""
        return await ask(self.place(), kind, **values)

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        self.check(spec)
        made = await self.ask("create", spec=spec.to_dict())
        return await self.get(made["name"])

    async def restore(self, snapshot: str, spec: SandboxSpec) -> SandboxHandle:
        made = await self.ask("restore", snapshot=snapshot, spec=spec.to_dict())
        return await self.get(made["name"])

    async def get(self, name: str) -> SandboxHandle:
        return self.handle(Records().load(self.backend, name))

    async def list(self) -> list[str]:
        return [record.name for record in Records().list(self.backend)]

    async def remove(self, name: str) -> None:
        with contextlib.suppress(SandboxNotFound):
            Records().load(self.backend, name)
            await asyncio.shield(self.ask("remove", name=name))

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        return [SnapshotInfo(**found) for found in await self.ask("snapshots")]

    async def remove_snapshot(self, name: str) -> None:
        await self.ask("remove_snapshot", name=name)

    async def diagnose(self) -> Sequence[Diagnosis]:
        return [Diagnosis(**found) for found in await self.ask("diagnose")]
