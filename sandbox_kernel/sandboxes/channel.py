"""Messages on a Unix socket of this machine: lines of JSON, and descriptors that come with them.

The local jail's clients and the broker with its clients talk like this.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.async_fd import AsyncFd
from sandbox_kernel.wire.descriptors import (
    close_all,
    receive_with_descriptors,
    send_with_descriptors,
)

_MAX_DESCRIPTORS = 3


class Hangup(Exception):
    """The other side is not there, or went away in the middle. The caller knows how to say why."""


class Unread(Hangup):
    """The other side has ended before it read everything, so it cannot have acted on it. Linux
    resets a connection with unread data, or one that was never accepted; any other just ends."""


class Channel:
    """One end of a connection, on the running loop. Owns the socket and the descriptors received.

    No message is longer than ``limit``, in either direction.
    """

    def __init__(self, sock: socket.socket, limit: int) -> None:
        self.socket = sock
        self._end = AsyncFd(sock)
        self._limit = limit
        self._received = bytearray()
        self._reset = False
        self._sending = asyncio.Lock()
        self.fds: list[int] = []
        """Descriptors that came with messages. The caller removes those that it takes."""

    def peer_uid(self) -> int:
        credentials = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("3i", credentials)[1])

    async def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Hangup if nobody will read it; SandboxError if it is too long."""
        data = json.dumps(message).encode() + b"\n"
        if len(data) > self._limit:
            raise SandboxError(
                f"A request of {len(data)} bytes is too long; the limit is {self._limit}. Pass "
                f"large values through a file or stdin."
            )
        async with self._sending:
            try:
                sent = send_with_descriptors(self.socket, data[:4096], fds)
                if sent < len(data):  # else the other side may have answered and gone by now
                    await asyncio.get_running_loop().sock_sendall(self.socket, data[sent:])
            except OSError as error:
                raise Unread from error

    async def receive(self) -> dict[str, Any]:
        """The next message; Hangup if there will be none."""
        while b"\n" not in self._received:
            if len(self._received) > self._limit or not await self._more():
                raise Unread if self._reset else Hangup
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise Hangup from None
        if not isinstance(message, dict):
            raise Hangup
        return message

    async def _more(self) -> bool:
        while not self._end.closed:
            try:
                data, fds = receive_with_descriptors(self.socket, 65536, _MAX_DESCRIPTORS)
            except BlockingIOError:
                await self._end.readable()
                continue
            except OSError as error:
                self._reset = isinstance(error, ConnectionResetError)
                return False
            self.fds += fds
            self._received += data
            return bool(data)
        return False

    def hang_up(self) -> None:
        """Nothing more will be sent; the last messages can still be received."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._end.close()
        close_all(self.fds)
        self.fds.clear()
