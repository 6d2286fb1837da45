"""Pieces of a command's output on their way to a reader, with a bound.

For backends whose SDK gives the output of all streams in one sequence: a task takes it in as long
as there is room here; then it waits, the SDK's own buffers fill, and the command is pushed back.
"""

from __future__ import annotations

import asyncio
from collections import deque

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
