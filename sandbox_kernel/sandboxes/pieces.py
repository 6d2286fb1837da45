"""Pieces of a command's output on their way to a reader, with a bound.

For backends whose SDK gives the output of all streams in one sequence: a task takes it in as long
as there is room here; then it waits, the SDK's own buffers fill, and the command is pushed back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.base import ExecStream

BUFFER = 512 * 1024
"""Bytes of a stream that wait here for a reader."""


class Pieces:
    """One stream."""

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
        """All that there is; empty at the end."""
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
        """What is here can still be read; nothing more is taken."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()


class PiecesStream(ExecStream):
    """A running command, for such a backend to derive from. Its task puts what comes into ``_out``
    and ``_err``; at the end it sets ``_code`` or ``_failure``, then ``_over``, and ends both."""

    def __init__(self) -> None:
        self._out, self._err = Pieces(), Pieces()
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
        """Wait for something to be written, but not longer than the command runs: what it does not
        read any more may wait for ever. BrokenPipeError then."""
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
