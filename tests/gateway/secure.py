"""Servers with certificates that stand for named hosts, and a gateway that ends TLS for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import trustme

from sandbox_kernel.gateway.tls.authority import Authority

from .origins import OK, Handler, Origin, Rig, origin, running

ROOT = trustme.CA()
"""Of the internet, as far as these tests go. Clients in a sandbox do not know it."""


def server_context(*names: str, protocols: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ROOT.issue_cert(*names).configure_cert(context)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def trusts_root() -> ssl.SSLContext:
    context = ssl.create_default_context()
    ROOT.configure_trust(context)
    return context


@dataclass
class Secure:
    """A gateway, the server behind it, and what its clients trust."""

    rig: Rig
    served: Origin
    authority: Authority
    host: str
    """``name:port`` of the server."""
    bundle: Path

    @property
    def proxy(self) -> str:
        return f"http://127.0.0.1:{self.rig.port}"

    @property
    def url(self) -> str:
        return f"https://{self.host}"

    def trusts_gateway(self, *protocols: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.authority.certificate.decode())
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context

    async def connect(
        self, *protocols: str, name: str = "a.example", trusts: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the server through CONNECT, with TLS."""
        reader, writer = await self.tunnel()
        context = trusts or self.trusts_gateway(*protocols)
        await writer.start_tls(context, server_hostname=name)
        return reader, writer

    async def tunnel(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.rig.connect()
        writer.write(f"CONNECT {self.host} HTTP/1.1\r\nHost: {self.host}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        return reader, writer

    async def talk(self, *sends: bytes) -> bytes:
        """Send bytes inside TLS, and read to the end."""
        reader, writer = await self.connect("http/1.1")
        for data in sends:
            writer.write(data)
        answer = b""
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                answer += data
        writer.close()
        return answer


@contextlib.asynccontextmanager
async def securing(
    folder: Path,
    *rules: Any,
    handle: Handler = OK,
    protocols: tuple[str, ...] = ("http/1.1",),
    names: tuple[str, ...] = ("a.example",),
    trusts: Callable[[], ssl.SSLContext] = trusts_root,
    **options: Any,
) -> AsyncIterator[Secure]:
    """``a.example``, behind a gateway with these rules."""
    authority = Authority("test")
    bundle = folder / "bundle.pem"
    bundle.write_bytes(authority.certificate)
    async with origin(handle, server_context(*names, protocols=protocols)) as served:
        host = f"a.example:{served.port}"
        trusted = [host, *(f"{n}:{served.port}" for n in ("b.example", "c.example"))]
        both = (authority, trusts)
        async with running(*rules, trusted=trusted, ends_tls=both, **options) as rig:
            yield Secure(rig, served, authority, host, bundle)


# --- a server of HTTP/2, straight on h2


@dataclass
class H2Request:
    headers: list[tuple[str, str]]
    body: bytearray = field(default_factory=bytearray)
    trailers: list[tuple[str, str]] = field(default_factory=list)

    def __getitem__(self, name: str) -> str:
        return dict(self.headers)[name]


@dataclass
class H2Server:
    """Answers each request, once it is complete, with 200 and a JSON text of what it has got."""

    requests: list[H2Request] = field(default_factory=list)
    resets: int = 0
    connections: int = 0
    answer: Callable[[h2.connection.H2Connection, int, H2Request], None] | None = None
    on_headers: Callable[[h2.connection.H2Connection, int], None] | None = None
    sent: int = 0
    pending: dict[int, bytearray] = field(default_factory=dict)
    """What is still to be sent, by stream, as windows allow. It then ends."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        connection.initiate_connection()
        open_requests: dict[int, H2Request] = {}
        writer.write(connection.data_to_send())
        while data := await reader.read(65536):
            for event in connection.receive_data(data):
                self._on(connection, open_requests, event)
            self._pump(connection)
            writer.write(connection.data_to_send())
            await writer.drain()

    def _pump(self, connection: h2.connection.H2Connection) -> None:
        for stream, left in list(self.pending.items()):
            with contextlib.suppress(h2.exceptions.ProtocolError):
                while left and (window := connection.local_flow_control_window(stream)):
                    size = min(window, len(left), connection.max_outbound_frame_size)
                    connection.send_data(stream, bytes(left[:size]), end_stream=size == len(left))
                    del left[:size]
                    self.sent += size
            if not left:
                del self.pending[stream]

    def _on(
        self,
        connection: h2.connection.H2Connection,
        open_requests: dict[int, H2Request],
        event: h2.events.Event,
    ) -> None:
        if isinstance(event, h2.events.RequestReceived):
            request = H2Request(_text(event.headers))
            open_requests[event.stream_id] = request
            self.requests.append(request)
            if self.on_headers:
                self.on_headers(connection, event.stream_id)
        elif isinstance(event, h2.events.DataReceived):
            open_requests[event.stream_id].body += event.data
            connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived):
            open_requests[event.stream_id].trailers = _text(event.headers)
        elif isinstance(event, h2.events.StreamReset):
            self.resets += 1
        elif isinstance(event, h2.events.StreamEnded):
            request = open_requests[event.stream_id]
            (self.answer or _echo)(connection, event.stream_id, request)


def _echo(connection: h2.connection.H2Connection, stream: int, request: H2Request) -> None:
    said = {
        "headers": request.headers,
        "trailers": request.trailers,
        "body": request.body.decode("latin-1"),
    }
    connection.send_headers(stream, [(":status", "200"), ("x-server", "h2")])
    connection.send_data(stream, json.dumps(said).encode()[:16000], end_stream=True)


def _text(headers: Any) -> list[tuple[str, str]]:
    return [(bytes(n).decode("latin-1"), bytes(v).decode("latin-1")) for n, v in headers]


# --- a client that says whatever a test wants


class H2Client:
    """Straight on h2, without the checks that would keep it from misbehaving."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        config = h2.config.H2Configuration(
            client_side=True,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
            validate_inbound_headers=False,
        )
        self.connection = h2.connection.H2Connection(config)
        self.connection.initiate_connection()
        self.events: list[h2.events.Event] = []
        self.acknowledges = True
        self.received = 0

    def send(self, *headers: tuple[str, str], end: bool = True) -> int:
        stream = self.connection.get_next_available_stream_id()
        self.connection.send_headers(stream, list(headers), end_stream=end)
        return stream

    def get(self, path: str, *more: tuple[str, str], method: str = "GET", **options: Any) -> int:
        authority = options.pop("authority", "a.example")
        return self.send(
            (":method", method),
            (":scheme", "https"),
            (":authority", authority),
            (":path", path),
            *more,
            **options,
        )

    async def flush(self) -> None:
        self._writer.write(self.connection.data_to_send())
        await self._writer.drain()

    async def until(self, done: Callable[[], bool]) -> None:
        """Exchange frames until something has happened. EOFError if the connection ends."""
        await self.flush()
        while not done():
            data = await self._reader.read(65536)
            if not data:
                raise EOFError
            for event in self.connection.receive_data(data):
                self.events.append(event)
                if isinstance(event, h2.events.DataReceived):
                    size = event.flow_controlled_length
                    self.received += size
                    if not self.acknowledges:
                        continue
                    with contextlib.suppress(h2.exceptions.ProtocolError):
                        self.connection.acknowledge_received_data(size, event.stream_id)
            await self.flush()

    def ended(self, stream: int) -> bool:
        over = (h2.events.StreamEnded, h2.events.StreamReset)
        return any(isinstance(e, over) and e.stream_id == stream for e in self.events)

    async def response(self, stream: int) -> tuple[int, bytes]:
        """Status and body of a stream's response; status 0: it was reset."""
        await self.until(lambda: self.ended(stream))
        status, body = 0, b""
        for event in self.events:
            if getattr(event, "stream_id", None) != stream:
                continue
            if isinstance(event, h2.events.ResponseReceived):
                status = int(dict(event.headers)[b":status"])
            elif isinstance(event, h2.events.DataReceived):
                body += event.data
        return status, body

    async def goodbye(self) -> int:
        """The code with which the gateway ends the connection."""
        with contextlib.suppress(EOFError, OSError):
            await self.until(lambda: False)
        for event in self.events:
            if isinstance(event, h2.events.ConnectionTerminated):
                return int(event.error_code or 0)
        return -1
