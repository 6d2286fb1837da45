"""Streams of a command whose SDK delivers all output as one sequence of events.

A task reads the events into bounded buffers. When a buffer is full, the task waits, the SDK's own
buffers fill, and the command blocks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.base import ExecStream

BUFFER = 512 * 1024
"""Bytes that a buffer holds for its reader."""


class BoundedBuffer:
    """Output of one stream that waits for its reader."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._changed = asyncio.Condition()

    async def put(self, data: bytes, *, most: int = BUFFER) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._size < most or self._ended)
            if not self._ended:
                self._pieces.append(data)
                self._size += len(data)
                self._changed.notify_all()

    async def get(self) -> bytes:
        """Everything in the buffer; empty at the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._pieces or self._ended)
            if not self._pieces:
                return b""
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            self._size = 0
            self._changed.notify_all()
            return data

    async def end(self) -> None:
        """Take nothing more; the rest can still be read."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()


class BufferedStream(ExecStream):
    """A running command. A subclass's task puts output into ``_out`` and ``_err``; at the end it
    sets ``_code`` or ``_failure``, then ``_over``, and ends both buffers."""

    def __init__(self) -> None:
        self._out, self._err = BoundedBuffer(), BoundedBuffer()
        self._code: int | None = None
        self._failure: SandboxError | None = None
        self._over = asyncio.Event()
        self._closed = False

    async def read(self) -> bytes:
        return await self._out.get()

    async def read_stderr(self) -> bytes:
        return await self._err.get()

    async def wait(self) -> int:
        await self._over.wait()
        if self._failure is not None:
            raise self._failure
        if self._code is None:
            raise SandboxError("the stream was closed before the command ended")
        return self._code

    async def _unless_over(self, writing: Awaitable[object]) -> None:
        """Wait for a write while the command runs. BrokenPipeError after that: nobody reads it."""
        task = asyncio.ensure_future(writing)
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise BrokenPipeError("the command has ended")
            task.result()
        finally:
            task.cancel()
            over.cancel()
