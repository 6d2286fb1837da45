"""Ways out last as long as the sandbox: over restarts of its kernel, and cuts of the link."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.conformance.kernels import execute, kernel, sandboxed
from tests.helpers.coroutines import finish
from tests.helpers.named_hosts import NamedHosts, listening, port_of, serve_with_threads

pytestmark = pytest.mark.slow

DIAL = """
import socket
sock = socket.create_connection(("db.example", 5432), timeout=60)
sock.sendall(b"hello"); print(sock.recv(100))
"""
GO_ON = "sock.sendall(b'still there'); print(sock.recv(100))"


def echo(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


def test_restarts_of_the_kernel_and_cuts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SANDBOX_KERNEL_EGRESS", "db.example:5432")
    hosts = NamedHosts(monkeypatch)
    with listening() as sock:
        serve_with_threads(echo, sock)
        hosts.add("db.example", 5432, port_of(sock))
        with kernel(cwd=str(tmp_path)) as (manager, client):
            assert execute(client, DIAL)[1] == "b'hello'\n"

            async def cut() -> None:
                sandboxed(manager).tunnel.cut()

            finish(cut())
            assert execute(client, GO_ON)[1] == "b'still there'\n", "a session outlives the link"
            for _ in range(2):  # the second is a spare that has started before
                manager.restart_kernel(now=True)
                client.wait_for_ready(timeout=120)
                assert execute(client, DIAL)[1] == "b'hello'\n"
