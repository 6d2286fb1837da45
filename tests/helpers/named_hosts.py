"""Servers on this machine that stand for named hosts elsewhere: each name has a public address, and
what would be dialled there reaches a port of the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sandbox_kernel.gateway import addresses
from sandbox_kernel.gateway.names import Address

_FIRST = ipaddress.ip_address("93.184.216.1")


class NamedHosts:
    """For every gateway of this process. A name that is not here cannot be resolved, an address
    that is not here refuses connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looked_up: list[str] = []
        self.dialled: list[tuple[str, int]] = []
        self._addresses: dict[str, list[str]] = {}
        self._ports: dict[tuple[str, int], int] = {}
        self._next = 0
        self._open = asyncio.open_connection
        monkeypatch.setattr(addresses, "SystemResolver", lambda: self._resolve)
        monkeypatch.setattr(asyncio, "open_connection", self._connect)

    def add(self, name: str, port: int, local_port: int) -> None:
        """What is asked of ``name:port`` is answered at ``local_port`` of the loopback."""
        self.add_address(self.address_of(name), port, local_port)

    def add_address(self, address: str, port: int, local_port: int) -> None:
        self._ports[address, port] = local_port

    def address_of(self, name: str) -> str:
        if name not in self._addresses:
            self._addresses[name] = [str(_FIRST + self._next)]
            self._next += 1
        return self._addresses[name][0]

    def point(self, name: str, *found: str) -> None:
        """Let a name resolve to these addresses."""
        self._addresses[name] = list(found)

    async def _resolve(self, name: str, port: int) -> Sequence[Address]:
        self.looked_up.append(name)
        if name not in self._addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [ipaddress.ip_address(text) for text in self._addresses[name]]

    async def _connect(
        self, host: str | None = None, port: int | None = None, **options: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if host is None or port is None:
            return await self._open(host, port, **options)
        self.dialled.append((host, port))
        if (host, port) not in self._ports:
            raise ConnectionRefusedError(111, "Connection refused")
        return await self._open("127.0.0.1", self._ports[host, port], **options)


def serve_with_threads(handle: Any, sock: socket.socket) -> None:
    """Serve each connection of a listening socket in a thread of its own, until it is closed."""

    def accept() -> None:
        while True:
            try:
                connection, _ = sock.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=[connection], daemon=True).start()

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                handle(connection)
            except OSError:
                pass  # the client has gone

    threading.Thread(target=accept, daemon=True).start()


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    """A socket that listens at a free port of the loopback."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as sock:
        yield sock
        sock.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept


def port_of(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port
