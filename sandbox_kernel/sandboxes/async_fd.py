"""Pipes, terminals and sockets on an event loop, and the two ends of a command's streams."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from sandbox_kernel.guest.commands.start import resize_terminal

_CHUNK = 256 * 1024
_SOCKET_BUFFER = 2**20


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


@contextlib.contextmanager
def stream_ends(
    *, duplex: bool, terminal: bool = False
) -> Iterator[tuple[list[int], list[int | socket.socket]]]:
    """The ends to hand over, and ours: of a socket, or of three pipes (stdin, stdout, stderr). A
    terminal has none yet: the far side makes it.

    Those to hand over are closed here in any case, because the far side gets copies; ours are
    closed unless the caller takes them out of the list.
    """
    theirs: list[int] = []
    ours: list[int | socket.socket] = []
    try:
        if terminal:
            pass
        elif duplex:
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            near.setblocking(False)
            for sock in (near, far):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
            # It has a name, so a hostile command cannot give it one in the host's name space.
            far.bind("")
            ours.append(near)
            theirs.append(far.detach())
        else:
            for number in range(3):
                read, write = os.pipe()
                ours.append(write if number == 0 else read)
                theirs.append(read if number == 0 else write)
        yield theirs, ours
    finally:
        for end in [*theirs, *ours]:
            end.close() if isinstance(end, socket.socket) else os.close(end)
