"""Copies bytes both ways between two connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sandbox_kernel.gateway.byte_source import ByteSource
from sandbox_kernel.gateway.names import Address
from sandbox_kernel.gateway.rewriting import Filter
from sandbox_kernel.gateway.watch import Watch

HALF_CLOSED = 60.0
"""Seconds for which a client may keep silent after its server has said its last."""


class Transport(Protocol):
    """What is used of asyncio's transports."""

    def abort(self) -> None: ...
    def get_write_buffer_size(self) -> int: ...


class Writer(Protocol):
    """What is used of asyncio.StreamWriter."""

    @property
    def transport(self) -> Transport: ...
    def write(self, data: bytes) -> None: ...
    async def drain(self) -> None: ...
    def can_write_eof(self) -> bool: ...
    def write_eof(self) -> None: ...
    def is_closing(self) -> bool: ...
    def close(self) -> None: ...
    async def wait_closed(self) -> None: ...
    def get_extra_info(self, name: str, default: Any = None) -> Any: ...


@dataclass(frozen=True)
class Wire:
    """One connection: what comes from it, and where to write to it."""

    source: ByteSource
    writer: Writer
    address: Address | None = None
    """Of a server: what was dialled."""

    @classmethod
    def of(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Wire:
        return cls(ByteSource(reader), writer)

    def at(self, address: Address | None) -> Wire:
        return replace(self, address=address)


@dataclass
class Counts:
    """Bytes that have passed, from the client and to it."""

    sent: int = 0
    received: int = 0


async def relay(
    client: Wire,
    server: Wire,
    counts: Counts,
    watch: Watch,
    *,
    first: Callable[[], Awaitable[None]] | None = None,
    downwards_filter: Filter | None = None,
) -> None:
    """Copy until both sides have ended, or one of them broke (OSError). The end of one direction is
    passed on, and the other continues. ``first`` runs before the client's first byte is passed on,
    while the server may already speak; what it raises ends both. The filter changes what the server
    sends. The caller closes both."""

    async def upwards() -> None:
        if first is not None:
            await first()
        while data := await client.source.some():
            server.writer.write(data)
            counts.sent += len(data)
            await server.writer.drain()
            watch.moved()
        _end(server.writer)

    async def downwards() -> None:
        while data := await server.source.some():
            if downwards_filter is not None:
                data = downwards_filter.feed(data)
            client.writer.write(data)
            counts.received += len(data)
            await client.writer.drain()
            watch.moved()
        if downwards_filter is not None:
            client.writer.write(downwards_filter.end())
        _end(client.writer)
        watch.hurry(HALF_CLOSED)

    both = [asyncio.create_task(upwards()), asyncio.create_task(downwards())]
    try:
        await asyncio.gather(*both)
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


def _end(writer: Writer) -> None:
    if not writer.is_closing() and writer.can_write_eof():
        writer.write_eof()
