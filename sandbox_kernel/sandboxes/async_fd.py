"""Reading and writing a pipe, terminal or socket on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from typing import Any

from sandbox_kernel.guest.commands.start import resize_terminal

_CHUNK = 256 * 1024


class AsyncFd:
    """The host's end of a pipe, terminal or socket, on the running event loop.

    Owns its descriptor. One reader and one writer at a time; both may wait at once.
    """

    def __init__(self, end: int | socket.socket) -> None:
        self._end = end
        self._fd = fd = end if isinstance(end, int) else end.fileno()
        self._waiters: dict[Callable[..., Any], asyncio.Future[None]] = {}
        os.set_blocking(fd, False)

    async def read(self) -> bytes:
        """The next piece; empty at the end, also if this end is closed meanwhile."""
        while self._fd >= 0:
            try:
                return os.read(self._fd, _CHUNK)
            except BlockingIOError:
                await self.readable()
            except OSError as error:
                # A terminal's end: nobody has it open any more.
                if error.errno in (errno.EIO, errno.ECONNRESET):
                    return b""
                raise
        return b""

    async def write(self, data: bytes) -> None:
        """All of it. BrokenPipeError if nobody will read it."""
        loop = asyncio.get_running_loop()
        left = memoryview(data)
        while left:
            if self._fd < 0:
                raise BrokenPipeError(errno.EPIPE, "the command's stdin is closed")
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                await self._ready(loop.add_writer, loop.remove_writer)

    async def readable(self) -> None:
        """Wait until there is something to read, or this end is closed."""
        loop = asyncio.get_running_loop()
        await self._ready(loop.add_reader, loop.remove_reader)

    async def _ready(self, add: Callable[..., Any], remove: Callable[..., Any]) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[remove] = waiter
        add(self._fd, _resolve, waiter)
        try:
            await waiter
        finally:
            if self._waiters.get(remove) is waiter:
                del self._waiters[remove]
                remove(self._fd)

    def resize(self, rows: int, columns: int) -> None:
        resize_terminal(self._fd, rows, columns)

    def end_input(self) -> None:
        """No more data from here; a socket can still be read."""
        if isinstance(self._end, socket.socket):
            with contextlib.suppress(OSError):
                self._end.shutdown(socket.SHUT_WR)
        else:
            self.close()

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for remove, waiter in waiters.items():
            remove(self._fd)
            _resolve(waiter)
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # Whoever took the socket may have closed it already, which it remembers.
            self._end.close() if isinstance(self._end, socket.socket) else os.close(fd)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
