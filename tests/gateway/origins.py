"""Servers on this machine that stand for named hosts, and a gateway to reach them through."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway.gate import Gate
from sandbox_kernel.gateway.gateway import Gateway
from sandbox_kernel.gateway.names import Address
from sandbox_kernel.gateway.service import Limits
from sandbox_kernel.gateway.tls.authority import Authority

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LOOPBACK = ipaddress.ip_address("127.0.0.1")


class RecordingReader(asyncio.StreamReader):
    def __init__(self) -> None:
        super().__init__()
        self.seen = bytearray()

    def feed_data(self, data: Any) -> None:
        self.seen.extend(data)
        super().feed_data(data)


@dataclass
class Origin:
    """A server. ``received`` is all that its clients have sent, a buffer for each connection."""

    port: int
    received: list[bytearray] = field(default_factory=list)

    @property
    def text(self) -> str:
        return b"".join(self.received).decode("latin-1")


def answering(response: bytes, *, close: bool = False) -> Handler:
    """Answers each request head with these bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(response)
                await writer.drain()
                if close:
                    return

    return handle


OK = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@contextlib.asynccontextmanager
async def origin(handle: Handler = OK, tls: ssl.SSLContext | None = None) -> AsyncIterator[Origin]:
    """A server on a free port of the loopback."""
    served = Origin(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def protocol() -> asyncio.StreamReaderProtocol:
        reader = RecordingReader()
        served.received.append(reader.seen)
        return asyncio.StreamReaderProtocol(reader, serve)

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0, ssl=tls)
    async with server:
        served.port = server.sockets[0].getsockname()[1]
        yield served


@dataclass
class Rig:
    """A gateway that listens on this machine."""

    gateway: Gateway
    gate: Gate
    port: int
    events: list[dict[str, Any]]
    resolved: list[str]

    async def talk(self, *sends: bytes) -> bytes:
        """Send bytes to the gateway, and read to the end."""
        reader, writer = await self.connect()
        for data in sends:
            writer.write(data)
        with contextlib.suppress(OSError):
            await writer.drain()
        answer = b""
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                answer += data
        writer.close()
        return answer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    def actions(self) -> list[str]:
        return [event["action"] for event in self.events]


@contextlib.asynccontextmanager
async def running(
    *rules: Any,
    trusted: Sequence[str] = (),
    names: Mapping[str, Sequence[str]] | None = None,
    default: str = "deny",
    transparent: tuple[str, int] | None = None,
    ends_tls: tuple[Authority, Callable[[], ssl.SSLContext]] | None = None,
    events: list[dict[str, Any]] | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    """A gateway with these rules, which ends TLS with an authority and what it trusts of servers,
    if given. Names resolve to the loopback, where ``trusted`` (``name:port``)
    may be dialled, or to what ``names`` has for them."""
    events = [] if events is None else events
    resolved: list[str] = []

    async def resolve(name: str, port: int) -> Sequence[Address]:
        resolved.append(name)
        found = (names or {}).get(name, ["127.0.0.1"])
        return [ipaddress.ip_address(text) for text in found]

    gate = Gate(EgressPolicy.of(*rules, default=default))
    options.setdefault("limits", Limits(head=20, idle=20))
    gateway = Gateway(gate, audit=events.append, resolve=resolve, private_names=trusted, **options)
    if ends_tls is not None:
        gateway.end_tls(*ends_tls)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if transparent is None:
            await gateway.serve(reader, writer)
        else:
            await gateway.serve_transparent(reader, writer, *transparent)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Rig(gateway, gate, server.sockets[0].getsockname()[1], events, resolved)
        gateway.close()
