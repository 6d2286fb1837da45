"""A gateway of the tests' own: every connection is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from sandbox_kernel.kernels import way_out

DIAL = """
import socket
def talk(address, data=b"hello"):
    sock = socket.create_connection(address, timeout=30)
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    found = b""
    while piece := sock.recv(65536):
        found += piece
    return found
"""
"""For scripts in a sandbox."""


class Echo:
    """Answers every connection with what it is meant for, and then with what it sends."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.every_megabyte: Callable[[], object] = lambda: None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._echo(reader, writer, "proxy")

    async def serve_transparent(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, port: int
    ) -> None:
        await self._echo(reader, writer, f"{name} {port}")

    def ports_for(self, name: str) -> Sequence[int]:
        self.asked.append(name)
        return (80, 443, 5432) if name.endswith(".example") else ()

    async def follow(self, note: object, in_use: object) -> None:
        """Its rules do not change."""

    async def _echo(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: str
    ) -> None:
        seen = 0
        writer.write(f"{what}\n".encode())
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
            if (seen + len(data)) // 2**20 > seen // 2**20:
                self.every_megabyte()
            seen += len(data)
        writer.write(b"\nthe end\n")
        writer.write_eof()
        await writer.drain()


def echo_for_all(monkeypatch: pytest.MonkeyPatch) -> Echo:
    """The gateway of every sandbox with rules, from now on."""
    gateway = Echo()

    async def gateway_for(handle: object, secrets: object = None) -> Echo:
        return gateway

    monkeypatch.setattr(way_out, "gateway_for", gateway_for)
    return gateway
