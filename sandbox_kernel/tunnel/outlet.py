"""Outlet: streams that the sandbox opens become connections to the gateway.

The sandbox may open whatever it likes: a target that is no way out is refused, and so is every
stream as long as nobody has set a gateway.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from sandbox_kernel.tunnel.owned_tasks import OwnedTasks
from sandbox_kernel.tunnel.stream_transport import StreamTransport, connect
from sandbox_kernel.wire.mux import Stream
from sandbox_kernel.wire.peer import Peer

MOST_CONNECTIONS = 256
_NAME = re.compile(r"[a-z0-9_.-]{1,253}")
_CLOSE_TIMEOUT = 2.0


class Gateway(Protocol):
    """Decides, dials and answers for the sandbox; ``sandbox_kernel.gateway`` has it. Each serves
    one connection until it is over, and does not raise."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A client of the proxy."""

    async def serve_transparent(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, port: int
    ) -> None:
        """A program that has dialled a name."""

    def ports_for(self, name: str) -> Sequence[int]:
        """The ports on which a name may be reached; none if no rule can permit it."""


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Outlet:
    """Belongs to a tunnel, and lives on its loop."""

    def __init__(
        self, peer: Peer, sandbox: str, log: logging.Logger | logging.LoggerAdapter[Any]
    ) -> None:
        self.gateway: Gateway | None = None
        self._peer = peer
        self._sandbox = sandbox
        self._log = log
        self._connections: set[StreamTransport] = set()
        self._tasks = OwnedTasks()
        peer.on_opened = self._opened

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    def close(self) -> None:
        """End every connection. The tunnel is over."""
        self.gateway = None
        for connection in list(self._connections):
            connection.end("the tunnel is closed", ConnectionResetError("the tunnel is closed"))

    def _opened(self, stream: Stream, target: str) -> None:
        gateway = self.gateway
        kind, _, rest = target.partition(":")
        what, _, rest = rest.partition(":")
        if gateway is None or kind != "egress":
            return stream.reset("nothing can be opened here")
        if len(self._connections) >= MOST_CONNECTIONS:
            return stream.reset("too many connections")
        port, _, name = rest.partition(":")
        if target == "egress:proxy":
            self._carry(stream, gateway.serve)
        elif what == "tcp" and _NAME.fullmatch(name) and port.isascii() and port.isdigit():
            self._carry(stream, partial(gateway.serve_transparent, name=name, port=int(port)))
        elif what == "ports" and _NAME.fullmatch(rest):
            stream.owner = _Unread(stream)
            stream.write(json.dumps(list(gateway.ports_for(rest))).encode())
            stream.finish()
            self._peer.flush_soon()
        else:
            stream.reset("nothing can be opened here")

    def _carry(self, stream: Stream, serve: Serve) -> None:
        reader, writer, connection = connect(self._peer, stream, self._connections.discard)
        self._connections.add(connection)
        self._tasks.start(self._serve(reader, writer, serve))

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, serve: Serve
    ) -> None:
        try:
            await serve(reader, writer)
        except Exception:  # noqa: BLE001  (a mistake in the gateway ends this connection only)
            self._log.exception("Sandbox %s: a connection to the outside failed", self._sandbox)
        finally:
            writer.close()
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await writer.wait_closed()
            except (OSError, TimeoutError):
                writer.transport.abort()


class _Unread:
    """A stream whose question was its target: nothing more is expected."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def on_data(self, payload: object) -> None:
        self._stream.reset("nothing more was expected")

    def on_finished(self) -> None: ...
    def on_reset(self, reason: str) -> None: ...
    def on_room(self) -> None: ...
