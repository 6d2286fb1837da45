"""A port of the host's loopback that leads to a port in a sandbox.

Sandboxes have no ports of their own to the outside. Each connection becomes a command in the
sandbox, which dials the port there and carries the bytes. Runs on the loop of the sandbox's
objects; whoever opens a PortForward closes it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Self

from sandbox_kernel.agents.raw_exec import end
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.base import ExecStream, SandboxHandle

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_MAX_CONNECTIONS = 64
_CHUNK = 2**16
_RELAY = """
import os, socket, sys, threading
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10)
sock.settimeout(None)
def send():
    while True:
        data = os.read(0, 65536)
        if not data:
            break
        sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while True:
    data = sock.recv(65536)
    if not data:
        break
    while data:
        data = data[os.write(1, data):]
"""


class PortForward:
    """Listens on a loopback port of the host: the sandbox's own number if that is free."""

    def __init__(self, handle: SandboxHandle, port: int) -> None:
        self._handle = handle
        self._target = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        """Where it listens."""

    async def open(self) -> Self:
        try:
            self._server = await asyncio.start_server(self._accepted, LOOPBACK, self._target)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            self._server = await asyncio.start_server(self._accepted, LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        """Stop listening, and end the connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        try:
            await self._carry(reader, writer)
        except (OSError, SandboxError) as error:
            _log.info("Sandbox %s, port %d: %s", self._handle.name, self._target, error)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        python = self._handle.python or "python3"
        argv = [python, "-I", "-c", _RELAY, str(self._target)]
        stream = await self._handle.open_stream(argv, cwd="/")
        inward = asyncio.create_task(_inward(reader, stream))
        try:
            while chunk := await stream.read():
                writer.write(chunk)
                await writer.drain()
        finally:
            inward.cancel()
            await asyncio.gather(inward, return_exceptions=True)
            await asyncio.shield(end(stream))


async def _inward(reader: asyncio.StreamReader, stream: ExecStream) -> None:
    while chunk := await reader.read(_CHUNK):
        await stream.write(chunk)
    await stream.close_stdin()
