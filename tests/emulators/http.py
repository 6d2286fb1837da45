"""A small HTTP/1.1 server on asyncio: routes, streamed answers, websockets (RFC 6455).

Handlers are coroutines that take a Request and return a Response, or answer by themselves through
``request.stream`` or ``request.websocket``. Whatever happens on a connection can be cut at any
time with ``Server.drop(owner)``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import ssl
import struct
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_MAX_HEAD = 64 * 1024
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10
_REASONS = {200: "OK", 201: "Created", 202: "Accepted", 204: "No Content", 101: "Upgrade"}


@dataclass
class Response:
    """An answer with its whole body: ``json`` (any JSON value) or ``body``."""

    status: int = 200
    json: Any = None
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        headers = {"Content-Type": "application/octet-stream", **self.headers}
        body = self.body
        if self.json is not None:
            body = json.dumps(self.json).encode()
            headers["Content-Type"] = "application/json"
        if self.status != 204:
            headers["Content-Length"] = str(len(body))
        return _head(self.status, headers) + (body if self.status != 204 else b"")


class Dropped(Exception):
    """The connection is to be cut without (another) answer."""


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class Request:
    """One request. ``owner`` says to whom its connection belongs, for ``Server.drop``."""

    def __init__(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        connection: Connection,
    ) -> None:
        split = urlsplit(target)
        self.method = method
        self.path = unquote(split.path)
        self.query = dict(parse_qsl(split.query, keep_blank_values=True))
        self.headers = headers
        self.body = body
        self.host = headers.get("host", "").partition(":")[0]
        self.match: re.Match[str]
        self.connection = connection

    @property
    def owner(self) -> str:
        return self.connection.owner

    @owner.setter
    def owner(self, owner: str) -> None:
        self.connection.owner = owner

    def json(self) -> Any:
        return json.loads(self.body or b"null")

    async def stream(self, content_type: str = "text/event-stream") -> Stream:
        """Begin an answer of unknown length; the caller closes it."""
        headers = {"Content-Type": content_type, "Transfer-Encoding": "chunked"}
        await self.connection.send(_head(200, headers))
        return Stream(self.connection)

    async def websocket(self, protocol: str, *, max_message: int) -> WebSocket:
        """Accept an upgrade. Messages from the client beyond ``max_message`` end it (1009)."""
        accept = hashlib.sha1(self.headers["sec-websocket-key"].encode() + _GUID).digest()
        headers = {
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Accept": base64.b64encode(accept).decode(),
            "Sec-WebSocket-Protocol": protocol,
        }
        await self.connection.send(_head(101, headers))
        return WebSocket(self.connection, max_message)


class Connection:
    """One accepted connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.owner = ""
        self.taken = False
        """A streamed answer or a websocket has it; it ends with them."""

    async def send(self, data: bytes) -> None:
        self.taken = True
        self.writer.write(data)
        await self.writer.drain()

    def cut(self) -> None:
        self.writer.transport.abort()


class Stream:
    """A streamed answer, in chunks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def send(self, data: bytes) -> None:
        if data:
            await self._connection.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, data: Any, event: str = "") -> None:
        """One server-sent event with JSON data."""
        name = f"event: {event}\n" if event else ""
        await self.send(f"{name}data: {json.dumps(data)}\n\n".encode())

    async def close(self) -> None:
        await self._connection.send(b"0\r\n\r\n")


class WebSocket:
    """The server's end of a websocket."""

    def __init__(self, connection: Connection, max_message: int) -> None:
        self._connection = connection
        self._max = max_message
        self._closed = False

    async def receive(self) -> str | bytes | None:
        """The next message, text or binary; None when the client has gone."""
        message = b""
        kind = 0
        while True:
            try:
                final, opcode, payload = await self._frame()
            except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
                return None
            if opcode == _PING:
                await self._send(_PONG, payload)
            elif opcode == _CLOSE:
                await self.close()
                return None
            elif opcode != _PONG:
                kind = opcode or kind
                message += payload
                if len(message) > self._max:
                    await self.close(1009, "message too big")
                    return None
                if final:
                    return message.decode() if kind == _TEXT else message

    async def _frame(self) -> tuple[bool, int, bytes]:
        read = self._connection.reader.readexactly
        first, second = await read(2)
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", await read(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", await read(8))
        mask = await read(4) if second & 0x80 else b""
        payload = await read(size)
        return bool(first & 0x80), first & 0x0F, _masked(payload, mask) if mask else payload

    async def send(self, message: str | bytes) -> None:
        if isinstance(message, str):
            await self._send(_TEXT, message.encode())
        else:
            await self._send(_BINARY, message)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(ConnectionError):
                await self._send(_CLOSE, struct.pack("!H", code) + reason.encode())

    async def _send(self, opcode: int, payload: bytes) -> None:
        size = len(payload)
        head = bytes([0x80 | opcode])
        if size < 126:
            head += bytes([size])
        elif size < 65536:
            head += struct.pack("!BH", 126, size)
        else:
            head += struct.pack("!BQ", 127, size)
        await self._connection.send(head + payload)


def _masked(payload: bytes, mask: bytes) -> bytes:
    size = len(payload)
    pattern = (mask * (size // 4 + 1))[:size]
    mixed = int.from_bytes(payload, "little") ^ int.from_bytes(pattern, "little")
    return mixed.to_bytes(size, "little")


Handler = Callable[[Request], Awaitable[Response | None]]
Around = Callable[[Request, Handler], Awaitable[Response | None]]


class Server:
    """Routes requests. ``around`` is asked for each one, and calls the handler itself."""

    def __init__(self, around: Around | None = None) -> None:
        self._routes: list[tuple[str, re.Pattern[str], Handler]] = []
        self._around = around
        self._connections: set[Connection] = set()
        self._servers: list[asyncio.Server] = []

    def route(self, method: str, pattern: str, handler: Handler) -> None:
        """Serve paths that match the whole pattern; its groups are in ``request.match``."""
        self._routes.append((method, re.compile(pattern), handler))

    async def listen(self, host: str = "127.0.0.1", *, tls: ssl.SSLContext | None = None) -> int:
        """Serve on a free port, which is returned."""
        server = await asyncio.start_server(self._serve, host, 0, ssl=tls, limit=2**20)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def drop(self, owner: str) -> None:
        """Cut every connection that belongs to somebody."""
        for connection in [c for c in self._connections if c.owner == owner]:
            connection.cut()

    def open_connections(self, owner: str) -> int:
        return sum(connection.owner == owner for connection in self._connections)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self._connections.add(connection)
        try:
            while not connection.taken:
                request = await self._read(connection)
                if request is None:
                    break
                try:
                    response = await self._answer(request)
                except (Dropped, ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
                    raise
                except Exception:  # noqa: BLE001  (a bug in the emulator: shown, and answered)
                    traceback.print_exc()
                    response = None if connection.taken else Response(500, {"error": "a bug"})
                if response is not None:
                    writer.write(response.encode())
                    await writer.drain()
        except (Dropped, ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            connection.cut()
        except asyncio.CancelledError:
            connection.cut()  # the emulator ends
        finally:
            self._connections.discard(connection)
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                writer.close()

    async def _read(self, connection: Connection) -> Request | None:
        try:
            head = await connection.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode("latin-1").strip().split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            connection.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _body(connection.reader, headers)
        return Request(method, target, headers, body, connection)

    async def _answer(self, request: Request) -> Response | None:
        for method, pattern, handler in self._routes:
            found = pattern.fullmatch(request.path)
            if method == request.method and found:
                request.match = found
                if self._around is not None:
                    return await self._around(request, handler)
                return await handler(request)
        return Response(404, {"error": {"code": "not_found", "message": "no such route"}})


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return body
    return await reader.readexactly(int(headers.get("content-length", "0")))
