"""Names that are this machine, as far as gateways of this process know; others are what they are.
See `named_hosts.py` for a network of the test's own."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sandbox_kernel.gateway import addresses
from sandbox_kernel.gateway.names import Address, Target

HERE, PRIVATE = ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("10.1.2.3")


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002


@contextmanager
def web_server() -> Iterator[int]:
    """Its port. Answers every request with hello."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def stand_for(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """For gateways of this process these names are this machine, as if it were a public one; other
    names that end in .example have the address that ``PRIVATE`` has."""
    system, check = addresses.SystemResolver(), addresses.may_dial

    async def resolve(name: str, port: int) -> Sequence[Address]:
        if name in names:
            return [HERE]
        return [PRIVATE] if name.endswith(".example") else await system(name, port)

    def may_dial(address: Address, target: Target, *rest: Any) -> str | None:
        return None if target.host in names else check(address, target, *rest)

    monkeypatch.setattr(addresses, "SystemResolver", lambda: resolve)
    monkeypatch.setattr(addresses, "may_dial", may_dial)
