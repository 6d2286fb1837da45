"""A link of the wire over a stream whose reads and writes are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from sandbox_kernel.wire.fdlink import LINK_BUFFER
from sandbox_kernel.wire.frames import Buffer


class ByteStream(Protocol):
    """What carries the bytes: a provider's ExecStream, or its execution."""

    async def read(self) -> bytes:
        """The next piece; empty at the end."""

    async def write(self, data: bytes) -> None: ...


class StreamLink:
    """A ``wire.peer.Link`` over ``stream``, which stays the caller's to close."""

    def __init__(self, stream: ByteStream, write_ahead: int | None = None) -> None:
        self.on_data: Callable[[bytes], object] = lambda data: None
        self.on_room: Callable[[], object] = lambda: None
        self.on_lost: Callable[[str], object] = lambda why: None
        self.on_closed: Callable[[], object] = lambda: None
        self.closed = False
        self._stream = stream
        self._most = write_ahead or LINK_BUFFER
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._more = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._carry())

    async def ended(self) -> None:
        """Wait until a closed link reads and writes no more."""
        if self._task is not None:
            await asyncio.wait([self._task])

    @property
    def room(self) -> int:
        return 0 if self.closed else max(0, self._most - self._pending_bytes)

    def hold(self) -> None:
        self._reading.clear()

    def release(self) -> None:
        self._reading.set()

    def write(self, buffers: Sequence[Buffer]) -> None:
        if not self.closed:
            self._pending += buffers
            self._pending_bytes += sum(map(len, buffers))
            self._more.set()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self._task is not None:
                self._task.cancel()
            self.on_closed()

    async def _carry(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write())
                await self._read()
                self._lost("the far end closed the stream")
        except* Exception as errors:  # noqa: BLE001  (a provider's SDK may raise anything)
            error = errors.exceptions[0]
            self._lost(f"{type(error).__name__}: {error}")

    def _lost(self, why: str) -> None:
        if not self.closed:
            self.close()
            self.on_lost(why)

    async def _read(self) -> None:
        while data := await self._stream.read():
            self.on_data(data)
            await self._reading.wait()

    async def _write(self) -> None:
        while not self.closed:
            await self._more.wait()
            self._more.clear()
            data, self._pending = b"".join(self._pending), []
            await self._stream.write(data)
            self._pending_bytes -= len(data)
            self.on_room()
