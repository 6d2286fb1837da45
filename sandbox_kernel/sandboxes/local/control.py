"""One request to jailinit, process 1 of a jail; the protocol is described in guest/jailinit.py.

Used by the client and by its streams. What comes back is bounded and checked: jailinit is ours,
but it lives among hostile code.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SandboxError, SandboxTimeout
from sandbox_kernel.guest.jailinit import MAX_REQUEST

SOCKET = "init.sock"
_MAX_ANSWER = 256 * 1024
_RETRY = 0.01


class Hangup(Exception):
    """jailinit is not there, or went away in the middle. The caller knows how to say why."""


def listen(runtime: Path) -> socket.socket:
    """The socket that a jail answers on. Only the host has its path: the jail gets the descriptor,
    so code in the jail cannot put something else in its place."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(runtime) as path:
            listener.bind(path)
        listener.listen(512)
    except BaseException:
        listener.close()
        raise
    return listener


class Control:
    """A connection for one request."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self._reading = asyncio.Lock()
        self._stop_waiting: Callable[[], None] | None = None
        self.fds: list[int] = []
        """Descriptors that came with an answer. Whoever takes one removes it from here."""

    @classmethod
    async def request(
        cls, runtime: Path, message: dict[str, Any], fds: Sequence[int] = (), *, timeout: float
    ) -> tuple[Control, dict[str, Any]]:
        """Send a request and wait for the first answer. Hangup if no jail is there to answer;
        SandboxTimeout; SandboxError for a request that is too long."""
        data = json.dumps(message).encode() + b"\n"
        if len(data) > MAX_REQUEST:
            raise SandboxError(
                f"A command with arguments and environment of {len(data)} bytes is too long for "
                f"the local jail, which takes {MAX_REQUEST}. Pass large values through a file or "
                f"stdin."
            )
        control = cls(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            control._sock.setblocking(False)
            return control, await asyncio.wait_for(control._first(runtime, data, fds), timeout)
        except asyncio.TimeoutError:
            control.close()
            raise SandboxTimeout(f"The jail did not answer within {timeout:g} s.") from None
        except BaseException:
            control.close()
            raise

    async def _first(self, runtime: Path, data: bytes, fds: Sequence[int]) -> dict[str, Any]:
        try:
            await self._connect(runtime)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            sent = self._sock.sendmsg([data], rights)
            if sent < len(data):
                await asyncio.get_running_loop().sock_sendall(self._sock, data[sent:])
        except (FileNotFoundError, ConnectionError) as error:
            raise Hangup from error
        return await self.answer()

    async def _connect(self, runtime: Path) -> None:
        while True:
            with _short_path(runtime) as path:
                try:
                    with contextlib.suppress(PermissionError):
                        os.utime(path)  # or what deletes old temporary files takes it for one
                    return self._sock.connect(path)
                except BlockingIOError:
                    pass  # many others are connecting just now
            await asyncio.sleep(_RETRY)

    async def answer(self) -> dict[str, Any]:
        """The next answer; Hangup if there will be none."""
        async with self._reading:
            while b"\n" not in self._received:
                if not await self._receive():
                    raise Hangup
                if len(self._received) > _MAX_ANSWER:
                    raise SandboxError(f"The jail sent an answer of more than {_MAX_ANSWER} bytes.")
            line, _, rest = bytes(self._received).partition(b"\n")
            self._received = bytearray(rest)
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise SandboxError(f"The jail sent what is no answer: {line[:200]!r}.")
        return message

    async def _receive(self) -> bool:
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        while True:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(65536, room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await self._readable()
                if self._sock.fileno() < 0:
                    return False
                continue
            except ConnectionError:
                return False
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                    self.fds.extend(fds)
            self._received += data
            return bool(data)

    async def _readable(self) -> None:
        """Wait for data, or for ``close``."""
        loop, fd = asyncio.get_running_loop(), self._sock.fileno()
        readable = loop.create_future()

        def stop() -> None:
            self._stop_waiting = None
            loop.remove_reader(fd)
            if not readable.done():
                readable.set_result(None)

        self._stop_waiting = stop
        loop.add_reader(fd, stop)
        try:
            await readable
        finally:
            if self._stop_waiting is stop:
                stop()

    def send(self, **message: Any) -> None:
        """Send a short message after the request. No error if nobody is there any more."""
        with contextlib.suppress(OSError):
            self._sock.send(json.dumps(message).encode() + b"\n")

    def hang_up(self) -> None:
        """Tell jailinit to end the command; its last answer can still be read."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self._stop_waiting is not None:
            self._stop_waiting()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self._sock.close()


@contextlib.contextmanager
def _short_path(runtime: Path) -> Iterator[str]:
    """A path of the socket that fits the 107 bytes that a Unix socket's path may have."""
    folder = os.open(runtime, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)
