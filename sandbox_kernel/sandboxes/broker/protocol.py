"""Messages between the broker and its clients: JSON lines, and descriptors that come with them.

A connection carries one request:

    {"protocol": 1, "kind": "create" | "get" | ..., ...}     with the ends of a stream's pipes
    {"result": ...}  or  {"error": class, "message": text}

After ``open_stream`` it stays open for ``{"signal": n}`` and ``{"resize": [rows, columns]}`` one
way and ``{"exit": code}`` or an error the other way; hanging up ends the command, and the broker
hangs up in turn when it has ended.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import sandbox_kernel.errors as errors
from sandbox_kernel.errors import SandboxError

PROTOCOL = 1
"""Raised when client and broker of different versions could not understand each other."""
MAX_MESSAGE = 4 * 2**20
_MAX_DESCRIPTORS = 3


class Hangup(Exception):
    """The other side is not there any more."""


class Unread(Hangup):
    """The other side has ended before it had read all that was sent to it, so it cannot have acted
    on that. Linux tells: a connection with unread data, or one that was never accepted, is reset,
    and any other just ends."""


class Channel:
    """One end of a connection, on the running loop. Owns the socket and what came with it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._received = bytearray()
        self._reset = False
        self._sending = asyncio.Lock()
        self._waiting: asyncio.Future[None] | None = None
        self.fds: list[int] = []
        """Descriptors that came with messages. Whoever takes one removes it from here."""

    def peer_uid(self) -> int:
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("3i", credentials)[1])

    async def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Hangup if nobody will read it; SandboxError if it is too long."""
        data = json.dumps(message).encode() + b"\n"
        if len(data) > MAX_MESSAGE:
            raise SandboxError(
                f"A request of {len(data)} bytes is too long; the limit is {MAX_MESSAGE}. Pass "
                f"large values through a file or stdin."
            )
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        async with self._sending:
            try:
                sent = self._sock.sendmsg([data[:4096]], rights)
                if sent < len(data):  # else the other side may have answered and gone by now
                    await asyncio.get_running_loop().sock_sendall(self._sock, data[sent:])
            except OSError as error:
                raise Unread from error

    async def receive(self) -> dict[str, Any]:
        """The next message; Hangup if there will be none."""
        while b"\n" not in self._received:
            if len(self._received) > MAX_MESSAGE or not await self._more():
                raise Unread if self._reset else Hangup
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        try:
            message = json.loads(line)
        except ValueError:
            raise Hangup from None
        if not isinstance(message, dict):
            raise Hangup
        return message

    async def _more(self) -> bool:
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        while self._sock.fileno() >= 0:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(65536, room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await self._readable()
                continue
            except OSError as error:
                self._reset = isinstance(error, ConnectionResetError)
                return False
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                    self.fds.extend(fds)
            self._received += data
            return bool(data)
        return False

    async def _readable(self) -> None:
        loop, fd = asyncio.get_running_loop(), self._sock.fileno()
        waiting = self._waiting = loop.create_future()
        loop.add_reader(fd, _resolve, waiting)
        try:
            await waiting
        finally:
            # ``close`` has taken it out already, and the number may be another's by now.
            if self._sock.fileno() == fd:
                loop.remove_reader(fd)

    def hang_up(self) -> None:
        """Nothing more will be sent; the last messages can still be received."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            if self._waiting is not None:
                asyncio.get_running_loop().remove_reader(self._sock.fileno())
                _resolve(self._waiting)
            self._sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def error_message(error: BaseException) -> dict[str, Any]:
    """An error as a message."""
    if isinstance(error, SandboxError):
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "SandboxError", "message": f"{type(error).__name__}: {error}"}


def raise_error(message: dict[str, Any]) -> None:
    """Raise what a message says, if it is about an error."""
    if "error" in message:
        found = getattr(errors, str(message["error"]), SandboxError)
        if not (isinstance(found, type) and issubclass(found, SandboxError)):
            found = SandboxError
        raise found(str(message.get("message", "")))
